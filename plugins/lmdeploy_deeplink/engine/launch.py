"""LMDeploy's command line, with `--backend deeplink`: ``python -m lmdeploy_deeplink.engine.launch serve api_server …``.

LMDeploy starts its engine in another process, which imports this module again (as ``__mp_main__``) before anything
else. So what is changed in LMDeploy is changed at import, in every process there is.
"""

from __future__ import annotations

from lmdeploy_deeplink import engine

if __name__ in ("__main__", "__mp_main__"):
    engine.install()

if __name__ == "__main__":
    from lmdeploy.cli import run

    run()
