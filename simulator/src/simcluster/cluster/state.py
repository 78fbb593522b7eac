"""What the API server's handlers work on: what is stored, and what is known of the kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simcluster.cluster.identities import Identities
from simcluster.cluster.resources import Catalog, standard_catalog
from simcluster.cluster.schema import Schema, standard_schema
from simcluster.cluster.store import Store


@dataclass
class ApiState:
    """`now_s`: seconds since the epoch. `documents`: OpenAPI documents made so far, by group and version."""

    now_s: Callable[[], float]
    identities: Identities
    store: Store
    tracks_managers: bool = True
    schema: Schema = field(default_factory=standard_schema)
    catalog: Catalog = field(default_factory=standard_catalog)
    documents: dict[str, bytes] = field(default_factory=dict)
