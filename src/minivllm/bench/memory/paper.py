"""What the paper publishes: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, arXiv 2309.06180. OPT-13B on one A100-40GB: memory for 15.7 thousand tokens of KV
cache (Table 1), sequences of at most 2,048; ShareGPT at 2 requests a second, Alpaca at 30.
"""

from dataclasses import dataclass

#: 12 GB at 800 KB a token (Table 1, section 3) are 15,728 tokens: as many blocks of 16.
SLOTS = 15_728
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class PaperFigures:
    """One system's bars: shares of the KV memory in percent, Figure 2; requests at once, Figure 13."""

    tokens: float
    reserved: float | None
    internal: float | None
    external: float | None
    running: dict[str, float]  #: by workload


FIGURES = {
    "paged": PaperFigures(96.3, None, None, None, {"sharegpt": 30.42, "alpaca": 132.44}),
    "max": PaperFigures(20.4, 13.3, 57.3, 8.9, {"sharegpt": 7.00, "alpaca": 7.00}),
    "pow2": PaperFigures(26.8, 17.9, 13.6, 41.6, {"sharegpt": 9.81, "alpaca": 43.24}),
    "oracle": PaperFigures(38.2, 25.2, None, 36.6, {"sharegpt": 13.62, "alpaca": 72.75}),
}
#: Request rates that vLLM sustains on ShareGPT, in multiples of the others' (section 6.2)
RATES = {"max": "2.7 – 8", "oracle": "1.7 – 2.7"}
#: Percent of the blocks saved by sharing. Alpaca: Figure 15, by samples and by beams; ShareGPT: section 6.3
SAVED_BY_SAMPLES = {"alpaca": {2: "6.09", 4: "8.53", 6: "9.79"}, "sharegpt": {2: "16.2", 6: "30.5"}}
SAVED_BY_BEAMS = {"alpaca": {2: "37.56", 4: "53.13", 6: "55.16"}, "sharegpt": {2: "44.3", 6: "66.3"}}
#: Throughput in multiples of the oracle's, by the tokens of the shared prefix (section 6.4, Figure 16)
PREFIX_SPEEDUP = {80: 1.67, 341: 3.58}
