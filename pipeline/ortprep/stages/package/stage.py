"""The last stage: manifest, loader config, golden sample, in one folder that appears in one rename."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ortprep
from ortprep.bundle import LOADER_FILE, REQUIREMENTS_FILE
from ortprep.bundle.conversion_record import LeftOut
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.bundle.environment import describe_need, format_requirements
from ortprep.bundle.loader_config import LOADER_SCHEMA_VERSION, LoaderConfig, write_loader_config
from ortprep.bundle.manifest import MANIFEST_SCHEMA_VERSION, Manifest, write_manifest
from ortprep.bundle.paths import is_safe_name
from ortprep.bundle.verification import check_bundle, describe_files
from ortprep.children.child import run_child
from ortprep.children.variant_check import check_variants
from ortprep.errors import BundleError, ChildError, LoadError, StageError
from ortprep.measuring.shipped import shipped_plan
from ortprep.runtime.loading.variant_selection import needs_gpu
from ortprep.spec.models import resolved_spec
from ortprep.stages.core.application_judge import ApplicationJudge, judge_key
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId
from ortprep.stages.core.provenance import describe_environment
from ortprep.stages.core.results import (
    FETCH,
    prepared_task,
    read_fetched,
    read_location,
    source_task,
)
from ortprep.stages.package.prepared_variants import (
    PreparedVariant,
    collect_variants,
    place_golden,
    place_variant,
)


class PackageStage:
    """Puts a bundle together."""

    name = "package"
    version = 9

    def variants(self, plan: Plan) -> tuple[str | None, ...]:  # noqa: ARG002
        """Returns `(None,)`: once per model."""
        return (None,)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:  # noqa: ARG002
        """Returns every other task of the model."""
        return (
            *dict.fromkeys((FETCH, *(source_task(plan, v) for v in plan.variants))),
            *(prepared_task(plan, v) for v in plan.variants),
            *(TaskId("verify", v) for v in plan.variants),
            *(TaskId("measure", v) for v in plan.tuned_variants),
        )

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns the spec's digest, and what the application is that judges."""
        return {
            **({} if plan.spec.convert is None else judge_key(plan.spec)),
            "spec": digest_json(resolved_spec(plan.spec)),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Writes the bundle, reads it back and loads it.

        Raises:
            StageError: The disk is full, or the bundle cannot be read back or loaded.
        """
        fetched, spec = read_fetched(context).description, context.spec
        prepared, left_out = collect_variants(context)
        variants = tuple(
            place_variant(context, variant)
            for variant in prepared
            if variant.plan.name == PORTABLE or shipped_plan(variant.record) != PORTABLE
        )
        config = LoaderConfig(
            schema_version=LOADER_SCHEMA_VERSION,
            name=spec.name,
            inputs=fetched.interface.inputs,
            outputs=fetched.interface.outputs,
            golden=place_golden(context),
            variants=variants,
            source=fetched.source.files,
        )
        write_loader_config(context.folder, config)
        config, prepared, refused = judge_variants(context, config, prepared)
        environment = run_child(describe_environment, None, timeout_s=120).value
        requirements = context.folder / REQUIREMENTS_FILE
        requirements.write_text(format_requirements(spec.name, environment), encoding="utf-8")
        manifest = Manifest(
            schema_version=MANIFEST_SCHEMA_VERSION,
            name=spec.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            pipeline_version=ortprep.__version__,
            spec_digest=digest_json(resolved_spec(spec)),
            source=replace(fetched.source, location=read_location(context)),
            environment=environment,
            variants=tuple(variant.record for variant in prepared),
            files=describe_files(context.folder),
            left_out=(*left_out, *refused),
        )
        write_manifest(context.folder, manifest)
        _check(context)
        on_gpu = any(needs_gpu(variant.requirements) for variant in config.variants)
        context.say(f"jobs need {describe_need(environment, on_gpu=on_gpu)}")
        return {"variants": [variant.name for variant in config.variants]}


def _check(context: Context) -> None:
    """Checks the bundle as a reader would, and loads every variant that this machine can run."""
    try:
        check_bundle(context.folder, DigestCache().digest)
    except BundleError as error:
        raise StageError(f"the bundle cannot be read back\n  {error.message}") from error
    # From where the files lie now: what was verified lay elsewhere, which may make a difference.
    try:
        for checked in check_variants(context.folder, timeout_s=context.spec.optimize.timeout_s):
            if checked.reasons:
                context.say(f"passed over {checked}")
    except (LoadError, ChildError) as error:
        raise StageError(f"the bundle cannot be used\n  {error.message}", hint=error.hint) from error


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
    names = [one.plan.name for one in prepared if one.plan.has_own_precision]
    if convert is None or convert.judge is None or not names:
        return config, tuple(prepared), ()
    judge = ApplicationJudge(context.spec, convert.judge, context.say)
    others = _other_bundles(context.folder.parent, config.name)
    left_out: list[LeftOut] = []
    for name in names:
        verdict, reason = None, ""
        # A session gets the first variant that fits: this one has to be alone to be judged.
        alone = tuple(one for one in config.variants if one.name == name)
        write_loader_config(context.folder, config._replace(variants=alone))
        try:
            verdict = judge.judge(context.folder, name, others=others)
            reason = "" if verdict.holds else f"refused with the other models: {verdict}"
        except StageError as error:
            reason = error.message
        context.say(f"judge {verdict or reason}")
        changed = []
        for one in prepared:
            if one.plan.name != name:
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
        config = config._replace(variants=tuple(one for one in config.variants if one.name not in removed))
        write_loader_config(context.folder, config)
    return config, tuple(prepared), tuple(left_out)


def _other_bundles(artifacts: Path, name: str) -> tuple[Path, ...]:
    """Returns the bundles of other models; a folder that is being written has no safe name."""
    return tuple(
        folder
        for folder in sorted(artifacts.iterdir())
        if folder.name != name and is_safe_name(folder.name) and (folder / LOADER_FILE).is_file()
    )
