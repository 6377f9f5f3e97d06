"""Embed real sentences on the GPU, a span a batch, and find what belongs together.

The model is WordLlama's (MIT): 32,000 token vectors of 256 dimensions, pooled to one vector a sentence. Its
weights and its tokenizer come inside the PyPI package, so nothing is downloaded when this runs.

    pip install -e ".[examples]" && python examples/sentence_embeddings.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import wordllama

from gpu_timed import configure, flush, gpu_timed
from gpu_timed.testing import capture

TEXTS = {
    "kitchen": ["Knead the dough and let it rise.", "Bake the bread until it is golden.", "Cook the soup with garlic."],
    "space": ["The rocket reached its orbit.", "Astronauts repaired the telescope.", "A probe flew past the moon."],
    "sea": ["Sailors fear a storm.", "The fishing boat came back to the harbour.", "High waves flooded the harbour."],
    "health": ["The doctor treated an infection.", "Nurses watched the patient.", "A vaccine protects the patient."],
}
BATCH = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Encoder:
    def __init__(self) -> None:
        # The folder of the package as the cache: by itself wordllama 0.4.0 looks for the tokenizer that it
        # ships in a folder it does not have, and goes to the network for it.
        shipped = Path(wordllama.__file__).parent
        model = wordllama.WordLlama.load(cache_dir=shipped, disable_download=True)
        self.tokenizer = model.tokenizer
        self.tokenizer.no_padding()  # a bag takes sentences of any length
        self.vectors = torch.nn.EmbeddingBag.from_pretrained(torch.tensor(model.embedding), mode="mean").to(DEVICE)

    @torch.inference_mode()
    @gpu_timed(name="encode", sync="deferred", attributes=lambda _, texts: {"batch": len(texts)})
    def encode(self, texts: list[str]) -> torch.Tensor:
        tokens = [found.ids for found in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        starts = [0, *itertools.accumulate(len(ids) for ids in tokens)][:-1]
        flat = torch.tensor(list(itertools.chain(*tokens)), device=DEVICE)
        return torch.nn.functional.normalize(self.vectors(flat, torch.tensor(starts, device=DEVICE)))


def main() -> None:
    configure(service_name="sentence-embeddings", exporter="jsonl", path="gpu_timed-spans.jsonl")
    encoder, texts = Encoder(), [text for group in TEXTS.values() for text in group]
    with capture() as records:
        found = torch.cat([encoder.encode(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)])

    alike = found @ found.T
    alike.fill_diagonal_(-1)  # a sentence is not its own neighbour
    for text, nearest, score in zip(texts, alike.argmax(1).tolist(), alike.amax(1).tolist(), strict=True):
        print(f"{score:.2f}  {text}  ~  {texts[nearest]}")
    for record in records:
        measured = isinstance(record.device_ns, int)
        device = f"{record.device_ns / 1e6:.3f} ms at most" if measured else record.device_ns.reason
        launch = f"{record.launch_ns / 1e6:.3f} ms"
        print(f"{record.name}: {record.attributes['batch']} texts, launch {launch}, device {device}")
    print("delivered" if flush(10) else "not delivered")


if __name__ == "__main__":
    main()
