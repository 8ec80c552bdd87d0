"""`RunHistory` and `RunSettings`: what a run's checkpoints keep beside model and optimizers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.evaluation import Evaluation
from torchrec_2dsp.programs.train.meter import Measured, Window
from torchrec_2dsp.programs.train.results import StepsTrained


class RunHistory:
    """All that a run has measured so far; equal on all ranks, and part of its train state."""

    def __init__(self) -> None:
        self.progress: list[StepsTrained] = []
        """The curve of the run."""
        self.evaluations: list[Evaluation] = []
        """The evaluations of the run."""

    @property
    def losses(self) -> list[float]:
        """The train loss of each step."""
        return [loss for steps in self.progress for loss in steps.measured.losses]

    @property
    def seconds(self) -> float:
        """The time that all steps took."""
        return sum(steps.window.seconds for steps in self.progress)

    def state_dict(self) -> dict[str, Any]:
        """The losses as a tensor, and the rest as plain values."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "progress": [_plain_progress(steps) for steps in self.progress],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the history of an earlier life of the run."""
        losses, end = state["losses"].tolist(), 0
        self.progress = []
        for plain in state["progress"]:
            start, end = end, end + plain["num_losses"]
            self.progress.append(_progress(plain, tuple(losses[start:end])))
        self.evaluations = [
            Evaluation(**{**plain, "losses": tuple(plain["losses"])})
            for plain in state["evaluations"]
        ]


def _plain_progress(steps: StepsTrained) -> dict[str, Any]:
    """Progress as plain values, without its losses and without what differs between ranks."""
    return {
        "step": steps.step,
        "num_losses": len(steps.measured.losses),
        "click_rate": steps.measured.click_rate,
        "seconds": steps.window.seconds,
        "memory_bytes": list(steps.window.memory_bytes),
        "table_lr": steps.table_lr,
        "dense_lr": steps.dense_lr,
        "samples_per_s": steps.samples_per_s,
    }


def _progress(plain: Mapping[str, Any], losses: tuple[float, ...]) -> StepsTrained:
    window = Window(
        Measured(losses, plain["click_rate"]), plain["seconds"], tuple(plain["memory_bytes"])
    )
    rates = {key: plain[key] for key in ("step", "table_lr", "dense_lr", "samples_per_s")}
    return StepsTrained(window=window, **rates)


class RunSettings:
    """The values of a config that a run can't change while it is stopped; in its train state.

    They decide which samples a step trains and how, so that a run with others would be another run.
    The mesh, and how rows travel, aren't among them.
    """

    def __init__(self, config: TrainConfig) -> None:
        loop, optimizer = config.loop, config.optimizer
        settings: dict[str, Any] = {
            "loop": loop.model_dump(mode="json", include={"global_batch_size", "accumulate"}),
            "data": config.data.model_dump(mode="json"),
            "model": config.model.model_dump(mode="json", exclude={"sharding_types"}),
            "optimizer": optimizer.model_dump(mode="json"),
        }
        if any(schedule.depends_on_length for schedule in optimizer.schedules):
            settings["loop"]["steps"] = loop.steps
        self._values = dict(_flat("", settings))

    def state_dict(self) -> dict[str, Any]:
        """The settings by their keys in the config, each as JSON."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: the settings are those of the save."""

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless the settings are those of the save.

        Raises:
            ConfigError: they differ; it names the first key that does.
        """
        for key in sorted(state.keys() | self._values.keys()):
            saved, now = (values.get(key, "nothing") for values in (state, self._values))
            if saved != now:
                raise ConfigError(
                    f"{key} was {saved} when the checkpoint was saved, and is {now} now, which "
                    f"would be another run; set it back, or start a new run in another folder"
                )


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """The leaves of nested dicts and lists, by their dotted keys, as JSON."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return [(prefix, json.dumps(value))]
    return [
        leaf for key, item in items for leaf in _flat(f"{prefix}.{key}" if prefix else key, item)
    ]
