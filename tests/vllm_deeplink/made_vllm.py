"""As much of vLLM as the scheduler half imports, for an environment without it. How vLLM calls is held by
`test_versions`, on the descriptions of its releases; here it is the tests that call."""

MODULES = {
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": """
class KVConnectorHandshakeMetadata: ...
class KVConnectorMetadata: ...
""",
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": """
class KVConnectorPromMetrics: ...
class KVConnectorStats:
    def __init__(self, data=None):
        self.data = data or {}
""",
    "vllm/v1/request.py": """
import enum
class RequestStatus(enum.Enum):
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3
""",
}
