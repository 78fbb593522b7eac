"""``gpuslice advise``: which pods request too much or too little, and which cards could be emptied."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import output_flag, print_document, tell


@click.command("advise")
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    envvar="GPUSLICE_PROMETHEUS_URL",
    show_envvar=True,
    help="Take peaks of the last days from this Prometheus, instead of those since each container's start.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 90),
    default=7,
    show_default=True,
    help="How many days to look back, with --prometheus.",
)
@click.option("--apply", is_flag=True, help="Resize running pods so, where they or their namespace consent.")
@click.option("--dry-run", is_flag=True, help="With --apply: say what would be done.")
@output_flag
@cluster_flags
@click.pass_context
def command(  # noqa: PLR0917 — click passes them by name
    context: click.Context,
    /,
    prometheus: str,
    days: int,
    apply: bool,
    dry_run: bool,
    output: str,
    **cluster: Any,
) -> None:
    """Find requests that are too large or too small.

    Also shows which cards could be emptied by moving which pods. A suggested size is the peak of a container
    plus 10 %: since its start, from the exporters, or over some days, from Prometheus. If memory was refused,
    it is larger; a smaller one is suggested only from ten minutes after the start. -n NAMESPACE limits it to
    the pods of one namespace. Nothing is changed.

    With --apply running pods are resized so, as by gpuslice resize, where the pod or its namespace has the
    annotation gpuslice.io/advice=apply. None gets less than it was created with.

    \b
    Examples:
      gpuslice advise
      gpuslice advise -n team-a -o json
      gpuslice advise --apply -n team-a --dry-run
      gpuslice advise --prometheus http://localhost:9090 --days 14
    """
    from gpuslice.apps.cli.cluster import read_measured
    from gpuslice.diagnosis.advise import words
    from gpuslice.diagnosis.advise.facts import advice_of
    from gpuslice.diagnosis.prometheus import Prometheus
    from gpuslice.diagnosis.usage import UsageByPod

    flags = flags_of(context, cluster)
    found = read_measured(flags, by_exporters=not prometheus)
    usage = found.usage
    if prometheus:
        usage = UsageByPod(Prometheus(prometheus).containers(days=days))
    if flags.namespace:
        usage = {key: each for key, each in usage.items() if key.startswith(f"{flags.namespace}/")}
    advice = advice_of(found, usage)
    if apply:
        from gpuslice.apps.cli.applying import apply_advice

        apply_advice(flags, found, advice, dry_run=dry_run)
        return
    if output == "table":
        tell(words.text(advice))
    else:
        print_document(words.document(advice), output)
