"""The training loop: transformers' Trainer with the two objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments

from prefillshare_training import collator, objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefillshare_training.models import Models
    from prefillshare_training.samples import Sample
    from prefillshare_training.settings import TrainSettings


class DecoderTrainer(Trainer):
    """Trains a decoder on the base's KV, or without a base on its own.

    The loss of an optimizer step is the sum over all its targets divided by their number, however
    they are spread over rows, accumulation steps and processes.
    """

    # `compute_loss` divides by the number of targets of the whole step.
    loss_is_scaled_for_ga = True

    def __init__(self, models: Models, args: TrainingArguments, **kwargs: Any) -> None:
        super().__init__(model=models.decoder, args=args, data_collator=collator.collate, **kwargs)
        self._shares_weights = models.base is models.decoder
        self._base = models.base
        if models.base is not None and not self._shares_weights:
            self._base = self._placed(models.base)
        # Whatever the decoder's class accepts: the targets are counted and divided by here.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: collator.Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Mean loss per target of the step, Eq. 7; scaled for the mean that DDP and FSDP take."""
        logits = self._logits(model, inputs)
        loss = objective.summed_loss(logits, inputs)
        if num_items_in_batch is None:
            loss = loss / inputs["labels"].ne(collator.IGNORED).sum()
        else:
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, {"logits": logits}) if return_outputs else loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: collator.Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss alone: a cache among a model's outputs cannot be gathered."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def _logits(self, model: torch.nn.Module, inputs: collator.Batch) -> torch.Tensor:
        if self._base is None:
            return objective.own_logits(model, inputs)
        base = self.accelerator.unwrap_model(model) if self._shares_weights else self._base
        return objective.shared_logits(model, inputs, objective.base_kv(base, inputs))

    def _placed(self, base: Any) -> Any:
        """The frozen base on this process's device, sharded where the decoder is."""
        if self.is_fsdp_enabled:
            return self.accelerator.prepare_model(base, evaluation_mode=True)
        return base.to(self.args.device)


def arguments(settings: TrainSettings) -> TrainingArguments:
    """`settings` in the Trainer's words."""
    args = TrainingArguments(
        output_dir=str(settings.run_dir),
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.scheduler,
        warmup_steps=settings.warmup_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        gradient_checkpointing=settings.gradient_checkpointing,
        # The other kind drops gradients of what comes in as a keyword, without a word.
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        save_steps=settings.save_steps,
        save_total_limit=2,
        # A loss that is no number is to be seen as such.
        logging_nan_inf_filter=False,
        eval_strategy="epoch" if settings.validation else "no",
        report_to="tensorboard",
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
        disable_tqdm=True,
        log_level="error",
    )
    # One process trains on one device: several would take larger steps than the settings say.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def rows(samples: Sequence[Sample], settings: TrainSettings) -> list[list[Sample]]:
    """The rows of an epoch: packed, or one sample each."""
    if settings.packing:
        return collator.pack(samples, settings.max_length)
    return [[sample] for sample in samples]
