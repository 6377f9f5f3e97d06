"""An async FastAPI service whose request spans hold the GPU's: prefill, decode steps, and a streamed answer.

pip install -e ".[examples]" uvicorn
python examples/fastapi_service.py                    # one request, sent by the program to itself
cd examples && uvicorn fastapi_service:app            # as a server; it answers POST /generate?tokens=4
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

from gpu_timed import configure, flush, gpu_timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 256

# Before instrumenting, which takes the provider it finds. A service would say exporter="otlp".
configure(service_name="llm", exporter="jsonl", path="gpu_timed-spans.jsonl", sync="deferred")
weights = torch.randn(WIDTH, WIDTH, device=DEVICE) / WIDTH**0.5
app = FastAPI()
# Makes the request's span, under the caller's if it sent a W3C traceparent; not one for each piece of the answer.
FastAPIInstrumentor.instrument_app(app, exclude_spans=["receive", "send"])


@gpu_timed(name="prefill")
def prefill(prompt: torch.Tensor) -> torch.Tensor:
    return torch.tanh(prompt @ weights)[-1:]


@gpu_timed(name="decode")
def decode(state: torch.Tensor) -> torch.Tensor:
    return torch.tanh(state @ weights)


@gpu_timed(name="stream")  # one span from the first token to the last; its time is what it ran, not what it waited
async def stream(state: torch.Tensor, tokens: int) -> AsyncIterator[str]:
    for _ in range(tokens):
        state = decode(state)
        # Reading a token waits for the device: on a thread, for the event loop has other requests.
        token = await asyncio.to_thread(lambda held: int(held.argmax()), state)
        yield f"{token}\n"


@app.post("/generate")
async def generate(tokens: int = 4) -> StreamingResponse:
    state = prefill(torch.randn(16, WIDTH, device=DEVICE))
    return StreamingResponse(stream(state, tokens), media_type="text/plain")


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        with trace.get_tracer("client").start_as_current_span("client") as span:
            headers: dict[str, str] = {}
            propagate.inject(headers)
            answer = await client.post("/generate", params={"tokens": 4}, headers=headers)
            print(f"{len(answer.text.split())} tokens in trace {span.get_span_context().trace_id:032x}:")
    print("client > POST /generate > prefill, and stream > decode for each token")
    print("delivered" if flush(10) else "not delivered")


if __name__ == "__main__":
    asyncio.run(main())
