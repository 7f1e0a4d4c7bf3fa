"""layout.stages equals what upstream's own functions build, stage by stage."""

from megatron_patch import layout
from tests.groups import run_ranks
from tests.unit.test_layout import FIRST, LAST, PP, VPP, config

EMBED, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CASES = [
    {"num_layers": 8, PP: 1}, {"num_layers": 8, PP: 2}, {"num_layers": 8, PP: 4}, {"num_layers": 8, PP: 2, VPP: 2},
    {"num_layers": 12, PP: 3, VPP: 4}, {"num_layers": 6, PP: 4, EMBED: True, LOSS: True}, {"num_layers": 7, PP: 4, EMBED: True},
    {"num_layers": 14, PP: 4, VPP: 2, EMBED: True, LOSS: True}, {"num_layers": 7, PP: 4, FIRST: 1},
    {"num_layers": 8, PP: 2, FIRST: 1, LAST: 7},
    {"num_layers": 12, PP: 4, FIRST: 2, LAST: 4}, {"num_layers": 12, PP: 3, VPP: 2, FIRST: 2, LAST: 6},
    {"num_layers": 8, PP: 2, "pipeline_model_parallel_layout": "Et*3|t|t*2,|t*2,L", VPP: 2},
    {"num_layers": 7, PP: 4, "pipeline_model_parallel_layout": "Et|(tt|)*2t*2,L"}]


def test_stages_equal_upstream():
    """Even, virtual, embedding/loss counted, uneven ends with and without virtual stages, layout strings."""
    theirs = run_ranks(1, "tests.upstream.layout_cases:upstream_split", CASES)[0]
    for fields, expected in zip(CASES, theirs):
        assert layout.stages(config(**fields)) == expected, fields
