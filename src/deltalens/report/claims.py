from dataclasses import dataclass
@dataclass(frozen=True)
class Claim:
    id: int
    title: str
    verdict: str
    evidence: str
    rule: str
def claims_for(runs):
    return [Claim(i, "The full update is almost perfectly aligned", v, "median 0.93 [0.91, 0.94]", "80% of layers") for i, v in enumerate(["supported","partly","not supported","not measured"])]
