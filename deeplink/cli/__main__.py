"""`python -m deeplink.cli`, for when the script `deeplink` is not on the PATH."""

from deeplink.cli import main

if __name__ == "__main__":
    main(prog_name="deeplink")
