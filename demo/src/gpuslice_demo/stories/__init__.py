"""The stories that the demo plays, each after a published document."""

from __future__ import annotations

from gpuslice_demo.steps import Story
from gpuslice_demo.stories import cgpu, claims, notebooks, pools

STORIES: dict[str, Story] = {
    one.name: one for one in (cgpu.STORY, pools.STORY, notebooks.STORY, claims.STORY)
}
