"""The finished bundle, judged by the application together with all other bundles that there are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.conversion_record import LeftOut
from ortprep.bundle.loader_config import LoaderConfig, Variant, write_loader_config
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import StageError
from ortprep.stages.core.application_judge import ApplicationJudge
from ortprep.stages.core.contract import Context
from ortprep.stages.package.prepared_variants import PreparedVariant


def judge_variants(
    context: Context, config: LoaderConfig, prepared: Sequence[PreparedVariant]
) -> tuple[LoaderConfig, tuple[PreparedVariant, ...], tuple[LeftOut, ...]]:
    """Has the application judge each variant in a precision of its own, and removes those that it refuses.

    Each model was judged alone when it was converted. Here the sessions of the other models come from their
    bundles, so the one that is built last is judged with all the others.

    Args:
        context: The task, whose folder has the whole bundle but for its manifest.
        config: The loader config of that bundle.
        prepared: Its variants.

    Returns:
        The loader config, the variants with their verdicts, and those that were removed, with why.

    Raises:
        SpecError: The judge does not work.
        OSError: The disk is full.
    """
    convert = context.spec.convert
    names = [one.plan.name for one in prepared if one.plan.has_own_precision and not one.plan.is_bucket]
    if convert is None or convert.judge is None or not names:
        return config, tuple(prepared), ()
    judge = ApplicationJudge(context.spec, convert.judge, context.say)
    others = _other_bundles(context.folder.parent, config.name)
    left_out: list[LeftOut] = []
    for name in names:
        verdict, reason = None, ""
        # A session gets the first variant that fits: this one has to be alone to be judged.
        alone = tuple(one for one in config.variants if one.name == name)
        write_loader_config(context.folder, replace(config, variants=alone))
        try:
            verdict = judge.judge(context.folder, name, others=others)
            reason = "" if verdict.holds else f"refused with the other models: {verdict}"
        except StageError as error:
            reason = error.message
        context.say(f"judge {verdict or reason}")
        changed = []
        for one in prepared:
            if name not in (one.plan.name, one.plan.parent):
                changed.append(one)
                continue
            conversion = one.record.conversion
            judged = conversion and replace(conversion, verdict=verdict)
            if not reason:
                changed.append(replace(one, record=replace(one.record, conversion=judged)))
            else:
                left_out.append(LeftOut(one.plan.name, reason, judged))
                shutil.rmtree(context.folder / one.plan.name)
        prepared = changed
        removed = {one.variant for one in left_out}
        config = replace(config, variants=_without(config.variants, removed))
        write_loader_config(context.folder, config)
    return config, tuple(prepared), tuple(left_out)


def _without(variants: Sequence[Variant], names: set[str]) -> tuple[Variant, ...]:
    return tuple(variant for variant in variants if variant.name not in names)


def _other_bundles(artifacts: Path, name: str) -> tuple[Path, ...]:
    """Returns the bundles of other models; a folder that is being written has no safe name."""
    return tuple(
        folder
        for folder in sorted(artifacts.iterdir())
        if folder.name != name and is_safe_name(folder.name) and (folder / LOADER_FILE).is_file()
    )
