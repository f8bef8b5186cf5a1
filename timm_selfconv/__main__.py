from timm_selfconv.cli import main

if __name__ == '__main__':
    main()
