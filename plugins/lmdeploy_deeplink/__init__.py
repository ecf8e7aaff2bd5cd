"""deeplink for LMDeploy: fused operators of several vendors in one process, its engine on them, and its migrations.

This module imports nothing, so that it can be loaded where there is neither LMDeploy nor torch.

    operators     what a fused operator is called with and gives back, one protocol each; what a vendor is
    reference     a vendor in plain torch, on any device that torch knows
    dlinfer       dlinfer's operators as a vendor, where dlinfer is installed
    conformance   whether a vendor's operators mean what the protocols say: `deeplink conform`
    engine        LMDeploy's PyTorch engine out of a vendor's operators: `deeplink serve lmdeploy`
    migration     its disaggregation over kvconnector: `--migration-backend deeplink`
    hooks         the vendors of this package, for deeplink's plugin loader
"""
