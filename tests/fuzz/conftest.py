"""Random cases and kills: HYPOTHESIS_PROFILE=deep pytest tests/fuzz runs 10,000 cases and 100 kills of each command."""
import os

from hypothesis import settings

settings.register_profile('ci', max_examples=40, deadline=None)
settings.register_profile('deep', max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'ci'))
