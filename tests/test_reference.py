from timm_selfconv.reference import PAGE, reference


def test_the_page_is_current():
    assert PAGE.read_text() == reference(), 'run: python -m timm_selfconv.reference'
