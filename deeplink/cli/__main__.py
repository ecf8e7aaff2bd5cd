"""`python -m deeplink.cli`."""

from deeplink.cli import main

main()
