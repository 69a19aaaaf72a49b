"""`spec.scheduling.speculation` of a replica: how tokens are guessed."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.fields import Model, epoch, restart, rules
from medha.api.model_spec import DraftSource

_DRAFT_MODEL_BY_METHOD = (
    "speculation.draftModel is given if, and only if, method is draftModel; name the checkpoint of a smaller model, or "
    "choose another method"
)


_HEAD_BY_METHOD = (
    "speculation.predictionHead is given if, and only if, method is predictionHead; set predictionHead.kind, or choose "
    "another method"
)


_HEAD_SOURCE_BY_KIND = (
    "predictionHead.source is given if, and only if, kind is eagle3; name the head's checkpoint, or set kind to mtp for "
    "the layer that the model's own checkpoint has"
)


class PredictionHeadSpec(Model):
    """Layers after the model's last one that predict further tokens of its hidden states."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.source) == (self.kind == 'eagle3')", _HEAD_SOURCE_BY_KIND))
    )

    kind: Literal["mtp", "eagle3"] = Field(json_schema_extra=restart())
    """Kind of the head. `mtp` is the first MTP layer that the checkpoint itself has, as DeepSeek-V3's does
    (`num_nextn_predict_layers`). `eagle3` is an EAGLE-3 head, which has a checkpoint of its own and was trained for this
    model."""
    source: DraftSource | None = Field(default=None, json_schema_extra=restart())
    """Checkpoint of the head. `kind` must be `eagle3`."""

    @model_validator(mode="after")
    def _kind_has_its_source(self) -> PredictionHeadSpec:
        if (self.source is not None) != (self.kind == "eagle3"):
            found = "without" if self.source is None else "with"
            raise ValueError(f"{_HEAD_SOURCE_BY_KIND} (found kind {self.kind} {found} source)")
        return self


class SpeculationSpec(Model):
    """Speculative decoding: tokens that are guessed, and verified several in a step. It changes no text
    (docs/speculation.md)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.draftModel) == (self.method == 'draftModel')", _DRAFT_MODEL_BY_METHOD),
            ("has(self.predictionHead) == (self.method == 'predictionHead')", _HEAD_BY_METHOD),
        )
    )

    method: Literal["none", "promptLookup", "draftModel", "predictionHead"] = Field(
        default="none", json_schema_extra=epoch()
    )
    """Method by which tokens are guessed. `promptLookup` takes what follows the last tokens where they occur in
    the prompt, the output, or outputs of earlier requests already, so it pays for texts that quote or repeat; it loads nothing. `draftModel` takes
    what a smaller model would write. `predictionHead` goes on from the model's own hidden states, with layers that were
    trained for it. `none` guesses nothing."""
    draft_model: DraftSource | None = Field(default=None, json_schema_extra=restart())
    """Checkpoint of the smaller model, with the served model's tokenizer. On each lane, the rank that samples loads it, too;
    its memory and that of its KV count there. It guesses for requests whose KV lies on one lane. `method` must be
    `draftModel`."""
    prediction_head: PredictionHeadSpec | None = Field(default=None, json_schema_extra=restart())
    """The prediction head. On each lane, the rank that samples loads it, too; its memory and that of its KV count there. It
    guesses for requests whose KV lies on one lane. `method` must be `predictionHead`."""
    max_draft_tokens: int = Field(default=4, ge=1, le=16, json_schema_extra=epoch())
    """Largest number of guessed tokens of a sequence that a step verifies. How many it does verify follows
    from how often they are right, the load, and the deadlines."""

    @property
    def proposes(self) -> bool:
        """True if the ranks that sample propose guesses, as many as steps ask for."""
        return self.method in ("draftModel", "predictionHead")

    @property
    def source(self) -> DraftSource | None:
        """The source of the checkpoint of the draft model or head; None without one."""
        head = self.prediction_head
        return self.draft_model if head is None else head.source

    @property
    def eagle3(self) -> bool:
        """True if guesses are proposed by an EAGLE-3 head."""
        return self.prediction_head is not None and self.prediction_head.kind == "eagle3"

    @model_validator(mode="after")
    def _method_has_its_model(self) -> SpeculationSpec:
        if (self.draft_model is not None) != (self.method == "draftModel"):
            found = "without" if self.draft_model is None else "with"
            raise ValueError(f"{_DRAFT_MODEL_BY_METHOD} (found method {self.method} {found} draftModel)")
        if (self.prediction_head is not None) != (self.method == "predictionHead"):
            found = "without" if self.prediction_head is None else "with"
            raise ValueError(f"{_HEAD_BY_METHOD} (found method {self.method} {found} predictionHead)")
        return self
