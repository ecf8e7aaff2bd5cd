"""A program for the engines' environment: an engine without a command line, asked about itself and for a few tokens.

ask_llm.py MODEL CONTROL_PORT TABLE_JSON
"""

from __future__ import annotations

import json
import sys
import urllib.request


def main(model: str, port: str, table: str) -> None:
    from vllm import LLM, SamplingParams

    from deeplink import secret

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        additional_config={"deeplink": json.loads(table)},
    )
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/contract", headers={"Accept": "application/json"})
    request.add_header("Authorization", f"Bearer {secret.control_token(secret.load())}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        contract = json.loads(answer.read())
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(range(100, 150))}], params, use_tqdm=False)
    print(json.dumps({"role": contract["role"], "tokens": list(output.outputs[0].token_ids)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
