"""Batches that heads of transformers may take: 8 samples of inputs by the names in `forward`, with labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny_models import CLASSES
from torch import Tensor, nn

SAMPLES, LENGTH = 8, 12
TEXT_END = 56  # the ids from here on stand for images and the like
# their samples are one after the other in one tensor
FLAT = ("pixel_values_flat", "input_ids_flat", "labels_flat", "image_grid_thw", "image_merge_sizes")
# as many in each sample as there are things in it
LISTS = ("mask_labels", "class_labels")
Batch = dict[str, Any]


def collate(samples: list[Batch]) -> Batch:
    """A batch of these samples: tensors stacked, patches of images one after the other, the rest in a list."""
    batch: Batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name in FLAT:
            batch[name.removesuffix("_flat")] = torch.cat(values)
        else:
            is_list = name in LISTS or not isinstance(values[0], Tensor)
            batch[name] = values if is_list else torch.stack(values)
    return batch


class Batches:
    """Batches that a head may take, as one value of each name for each sample.

    Args:
        model: the head.

    Attributes:
        error: what the head said to the last batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self.kind = type(model).__name__
        self.error = ""
        parameters = inspect.signature(model.forward).parameters
        self.names = set(parameters)
        self.required = {
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        self.generator = torch.Generator().manual_seed(1)
        # ragged: so many targets in each sample
        self.kept = torch.arange(LENGTH) < torch.tensor([12, 3, 7, 12, 5, 2, 9, 4])[:, None]

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).double()

    def setting(self, name: str, default: Any, *parts: str) -> Any:
        """A field of the config, or of the first of these configs in it that has it."""
        for part in parts:
            found = getattr(getattr(self.config, part, None), name, None)
            if found is not None:
                return found
        found = getattr(self.config, name, None)
        return default if found is None else found

    def __iter__(self) -> Iterator[Batch]:
        """The likelier first."""
        for inputs in self.inputs():
            inputs = {**inputs, **self.extras(inputs)}
            if inputs:
                yield from ({**inputs, **labels} for labels in self.labels(inputs))

    def inputs(self) -> Iterator[Batch]:
        """Returns the inputs of the head."""
        if "input_ids" not in self.names:
            if self.has_images:
                yield from self.images()
            elif self.names & {"input_values", "input_features"}:
                yield from self.sounds()
            else:
                yield {}
            return
        yield from self.choices()
        if self.kind.startswith("Musicgen") and self.kind.endswith("CausalLM"):
            yield {"input_ids_flat": self.ints(TEXT_END, SAMPLES, self.config.num_codebooks, LENGTH, low=5)}
        if self.kind.startswith("CsmForConditional"):
            yield {"input_ids": self.ints(TEXT_END, SAMPLES, LENGTH, self.config.num_codebooks, low=5)}
        if self.has_images:
            for pictures in self.images():
                yield from self.beside_text("image", pictures)
        elif "input_features" in self.names or "input_values" in self.names:
            for sounds in self.sounds():
                yield from self.beside_text("audio", sounds)
        if not self.required & {"pixel_values", "input_features", "input_values"}:
            yield self.text()

    @property
    def has_images(self) -> bool:
        return bool(self.names & {"pixel_values", "pixel_values_videos"})

    def text(self) -> Batch:
        found: Batch = {"input_ids": self.ints(TEXT_END, SAMPLES, LENGTH, low=5)}
        if self.kind.endswith("SequenceClassification"):
            end = self.config.eos_token_id
            found["input_ids"][:, -1] = end[0] if isinstance(end, list) else end
        if self.kind.startswith("Longformer"):
            found["input_ids"][:, 3:10:3] = self.config.sep_token_id
        if "attention_mask" in self.names:
            found["attention_mask"] = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
        if "bbox" in self.names:
            found["bbox"] = torch.ones(SAMPLES, LENGTH, 8 if "Bros" in self.kind else 4, dtype=torch.long)
        return found

    def beside_text(self, kind: str, others: Batch) -> Iterator[Batch]:
        """A text and images or sounds, whose places in the text are of a number that is not known before."""
        text = self.text()
        yield {**text, **others}
        place = self.setting(f"{kind}_token_id", self.setting(f"{kind}_token_index", None, "text_config"))
        if place is None:
            return
        numbers, tried = [1], set[int]()
        while numbers:
            number = numbers.pop(0)
            if number in tried:
                continue
            tried.add(number)
            places = torch.full((SAMPLES, number), place)
            ids = torch.cat([text["input_ids"][:, :1], places, text["input_ids"][:, 1:]], 1)
            found = {**text, **others, "input_ids": ids}
            if "attention_mask" in self.names:
                found["attention_mask"] = torch.ones_like(ids)
            for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
                if name in self.names:
                    found[name] = (ids == place).long()
            yield found
            numbers += self.numbers_of_places()

    def numbers_of_places(self) -> list[int]:
        """Returns the places that an image may need in each text, by the error that a wrong number gave."""
        features = re.search(r"features\W+(\d+)", self.error)
        if features is None:
            return []
        number = int(features[1]) // SAMPLES
        return [wanted for width in (64, 48, 32, 1) if 0 < (wanted := number // width) <= 256 and number % width == 0]

    def images(self) -> Iterator[Batch]:
        name = "pixel_values" if "pixel_values" in self.names else "pixel_values_videos"
        parts = ("vision_config", "image_config", "backbone_config", "vision_encoder_config", "encoder")
        channels = self.setting("num_channels", 3, *parts)
        size = self.setting("image_size", 0, *parts)
        frames = self.setting("num_frames", 2, *parts)
        if "image_grid_thw" in self.names:
            yield from self.patches(parts)
        for edge in (size,) if size else (32, 64):
            height, width = edge if isinstance(edge, list | tuple) else (edge, edge)
            for shape in ((), (1,), (frames,), (2,)):
                found: Batch = {name: self.noise(SAMPLES, *shape, channels, height, width)}
                if "image_sizes" in self.names:
                    found["image_sizes"] = torch.tensor([[height, width]]).repeat(SAMPLES, 1)
                if self.kind.startswith("Siglip2") or "spatial_shapes" in self.names:
                    break
                yield found
        if "spatial_shapes" in self.names:
            patch = self.setting("patch_size", 8, *parts)
            yield {
                "pixel_values": self.noise(SAMPLES, 16, channels * patch**2),
                "pixel_attention_mask": torch.ones(SAMPLES, 16, dtype=torch.long),
                "spatial_shapes": torch.tensor([[4, 4]]).repeat(SAMPLES, 1),
            }

    def patches(self, parts: tuple[str, ...]) -> Iterator[Batch]:
        """Images of 4 x 4 patches, those of all samples one after the other."""
        patch = self.setting("patch_size", 8, *parts)
        channels = self.setting("in_channels", self.setting("num_channels", 3, *parts), *parts)
        found: Batch = {"image_grid_thw": torch.tensor([[[1, 4, 4]]]).repeat(SAMPLES, 1, 1)}
        if "image_merge_sizes" in self.names:
            found["image_merge_sizes"] = torch.full((SAMPLES, 1), 2)
        for frames in dict.fromkeys((self.setting("temporal_patch_size", 1, *parts), 1)):
            yield {**found, "pixel_values_flat": self.noise(SAMPLES, 16, channels * frames * patch**2)}
        yield {**found, "pixel_values_flat": self.noise(SAMPLES, 16, channels, patch, patch)}

    def sounds(self) -> Iterator[Batch]:
        parts = ("audio_config", "encoder_config", "speech_config", "audio_encoder")
        bins = self.setting("num_mel_bins", self.setting("feature_size", 80, *parts), *parts)
        masks = {"input_features_mask", "feature_attention_mask"} & self.names
        if "input_values" in self.names:
            yield {"input_values": self.noise(SAMPLES, 1000)}
            yield {"input_values": self.noise(SAMPLES, self.setting("max_length", 64), bins)}
            yield {"input_values": self.noise(SAMPLES, 1, 1000)}
        if "input_features" in self.names:
            steps = self.setting("max_source_positions", 32, *parts) * 2
            for width in dict.fromkeys((bins, self.setting("feature_projection_input_dim", 80), 80, 128, 32, 320)):
                for shape in ((64, width), (width, steps)):
                    length = shape[0] if shape[1] == width else shape[1]
                    mask = torch.ones(SAMPLES, length, dtype=torch.long)
                    found: Batch = {"input_features": self.noise(SAMPLES, *shape), **dict.fromkeys(masks, mask)}
                    if "input_ids" not in self.names and "attention_mask" in self.names:
                        yield {**found, "attention_mask": mask}
                    yield found

    def choices(self) -> Iterator[Batch]:
        """Two texts a sample."""
        texts = self.ints(TEXT_END, SAMPLES, 2, LENGTH, low=5)
        if self.kind.startswith("Longformer"):
            texts[..., 3:10:3] = self.config.sep_token_id
        if self.kind.endswith("MultipleChoice"):
            yield {"input_ids": texts, "attention_mask": torch.ones_like(texts)}
            yield {"input_ids": texts}
        if "mc_labels" in self.names:
            yield {"input_ids": texts, "mc_token_ids": self.ints(LENGTH, SAMPLES, 2)}

    def extras(self, inputs: Batch) -> Batch:
        """Other inputs, by their names."""
        found: Batch = {}
        for names, make in EXTRAS:
            if set(names.split()) <= self.names and names.split()[-1] not in inputs:
                found.update(make(self, inputs))
        return found

    def entities(self, inputs: Batch) -> Batch:
        """Spans of a text (LUKE)."""
        number = 1 + ("Pair" in self.kind) + 2 * ("Span" in self.kind)
        shape = (SAMPLES, number)
        found: Batch = {
            "entity_ids": self.ints(4, *shape, low=1),
            "entity_attention_mask": torch.ones(shape, dtype=torch.long),
            "entity_position_ids": self.ints(LENGTH, *shape, 4),
        }
        if "entity_start_positions" in self.names:
            found["entity_start_positions"] = self.ints(4, *shape)
            found["entity_end_positions"] = self.ints(LENGTH, *shape, low=4)
        return found if "Entity" in self.kind else {}

    def regions(self, inputs: Batch) -> Batch:
        """Features of five regions of an image."""
        shape = (2, 5) if "MultipleChoice" in self.kind else (5,)
        if "visual_feats" in self.names:
            features, width = "visual_feats", self.config.visual_feat_dim
            others: Batch = {"visual_pos": torch.rand(SAMPLES, 5, 4, generator=self.generator).double()}
        else:
            features, width = "visual_embeds", self.config.visual_embedding_dim
            others = {"visual_attention_mask": torch.ones(SAMPLES, *shape, dtype=torch.long)}
        if "region_to_phrase_position" in self.names:
            others["region_to_phrase_position"] = self.ints(LENGTH, SAMPLES, LENGTH)
        return {features: self.noise(SAMPLES, *shape, width), **others}

    def series(self, inputs: Batch) -> Batch:
        """A past and a future with `input_size` or `num_input_channels` channels."""
        past = self.setting("context_length", 16)
        lags = getattr(self.config, "lags_sequence", None)
        channels = getattr(self.config, "num_input_channels", None)
        horizon = self.setting("prediction_length", self.setting("horizon_length", 8))
        if channels is None and lags is None:
            return {"past_values": self.noise(SAMPLES, past), "future_values": self.noise(SAMPLES, horizon)}
        past += max(lags or [0])
        inner = (channels,) if channels else ()
        found: Batch = {"past_values": self.noise(SAMPLES, past, *inner)}
        if "future_values" in self.names:
            found["future_values"] = self.noise(SAMPLES, horizon, *inner)
        if "past_time_features" in self.names:
            features = max(self.config.num_time_features, 0)
            found["past_time_features"] = self.noise(SAMPLES, past, features)
            found["future_time_features"] = self.noise(SAMPLES, horizon, features)
            found["past_observed_mask"] = torch.ones(SAMPLES, past)
        return found

    def masked_patches(self, inputs: Batch) -> Batch:
        """So many masked patches in each image."""
        if not self.kind.endswith(("MaskedImageModeling", "PreTraining")) or "pixel_values" not in inputs:
            return {}
        patch = self.setting("patch_size", 8)
        pixels = inputs["pixel_values"]
        number = (pixels.shape[-1] // patch) ** 2
        if pixels.dim() == 5:
            number *= pixels.shape[1] // self.setting("tubelet_size", 2)
        order = torch.rand(SAMPLES, number, generator=self.generator).argsort(1)
        return {"bool_masked_pos": order < number // 2}

    def prompts(self, inputs: Batch) -> Batch:
        """An image with its segmentation as the prompt (SegGPT)."""
        pixels = inputs["pixel_values"]
        return {"prompt_pixel_values": self.noise(*pixels.shape), "prompt_masks": self.noise(*pixels.shape)}

    def sampled_negatives(self, inputs: Batch) -> Batch:
        steps = inputs["input_values"].shape[-1]
        for kernel, stride in zip(self.config.conv_kernel, self.config.conv_stride, strict=True):
            steps = (steps - kernel) // stride + 1
        masked = torch.rand(SAMPLES, steps, generator=self.generator).argsort(1) < steps // 2
        negatives = self.ints(steps, SAMPLES, steps, self.config.num_negatives)
        return {"mask_time_indices": masked, "sampled_negative_indices": negatives}

    def attacked(self, inputs: Batch) -> Batch:
        """A text as it was and as it was attacked (RoCBert)."""
        ids = {name for name in self.names if name.startswith(("attack", "labels")) and name.endswith("_ids")}
        masks = {name for name in self.names if name.startswith(("attack", "labels")) and name.endswith("mask")}
        ones = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
        found: Batch = {name: self.ints(TEXT_END, SAMPLES, LENGTH, low=5) for name in sorted(ids)}
        found.update({name: torch.zeros_like(ones) for name in ids if "type" in name})
        return {**found, **dict.fromkeys(sorted(masks), ones)}

    def first_tokens(self, inputs: Batch) -> Batch:
        """The tokens that begin a box, and those that follow them (BROS)."""
        found: Batch = {"bbox_first_token_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.bool)}
        if "initial_token_labels" in self.names:
            found["initial_token_labels"] = self.ints(2, SAMPLES, LENGTH)
            found["subsequent_token_labels"] = self.ints(LENGTH, SAMPLES, LENGTH)
        return found

    def images_seen(self, inputs: Batch) -> Batch:
        """All of the images by all of the tokens (IDEFICS)."""
        is_idefics = self.kind.startswith("Idefics") and "input_ids" in inputs
        return {"image_attention_mask": torch.ones(*inputs["input_ids"].shape, 1)} if is_idefics else {}

    def motions(self, inputs: Batch) -> Batch:
        """A state and the actions to take, with the noise of the flow that is matched to them."""
        shape = (SAMPLES, self.config.chunk_size, self.config.max_action_dim)
        found: Batch = {"noise": self.noise(*shape), "actions": self.noise(*shape)}
        found["timestep"] = torch.rand(SAMPLES, generator=self.generator).double()
        return {**found, "state": self.noise(SAMPLES, self.config.max_state_dim)}

    def order_of_patches(self, inputs: Batch) -> Batch:
        """The noise that chooses the patches to mask (ViTMAE)."""
        if not self.kind.startswith("ViTMAE"):
            return {}
        patches = (self.config.image_size // self.config.patch_size) ** 2
        return {"noise": torch.rand(SAMPLES, patches, generator=self.generator).double()}

    def questions(self, inputs: Batch) -> Batch:
        """Returns the places of the questions (Splinter)."""
        is_asked = self.kind.endswith("PreTraining")
        return {"question_positions": self.ints(LENGTH, SAMPLES, 1)} if is_asked else {}

    def image_places(self, inputs: Batch) -> Batch:
        """The places of an image in a text (KOSMOS-2)."""
        if "pixel_values" not in inputs:
            return {}
        places = torch.zeros(SAMPLES, inputs["input_ids"].shape[1])
        places[:, 1 : 1 + self.config.latent_query_num] = 1
        return {"image_embeds_position_mask": places}

    def text_inputs(self) -> Tensor:
        number = self.config.num_queries - self.config.text_encoder_n_ctx
        return self.ints(TEXT_END, SAMPLES, number, self.config.task_seq_len)

    def target_values(self) -> Tensor:
        if "Classification" in self.kind:
            return self.ints(2, SAMPLES)
        return self.noise(SAMPLES, self.setting("num_targets", 1))

    def flattened_patches(self) -> Tensor:
        places = torch.stack([torch.arange(16) // 4 + 1, torch.arange(16) % 4 + 1], 1).double()
        patches = self.noise(SAMPLES, 16, self.config.vision_config.patch_embed_hidden_size)
        return torch.cat([places.expand(SAMPLES, 16, 2), patches], 2)

    def labels(self, inputs: Batch) -> Iterator[Batch]:
        """Labels for these inputs, the likelier first."""
        if "start_positions" in self.names:
            yield {"start_positions": self.ints(LENGTH, SAMPLES), "end_positions": self.ints(LENGTH, SAMPLES)}
        if "return_loss" in self.names:
            yield {"return_loss": [True] * SAMPLES}
        if "mask_labels" in self.names:
            yield from self.of_masks(inputs)
        if "future_values" in self.names:
            yield {}
        if "labels" not in self.names:
            yield {}
        elif "input_ids_flat" in inputs or (inputs.get("input_ids", self.kept).dim() == 3 and "Csm" in self.kind):
            yield from self.of_codebooks()
        elif "input_ids" in inputs:
            yield from self.of_texts(inputs["input_ids"])
        elif self.has_images:
            yield from self.of_images(inputs)
        else:
            yield from self.of_sounds()

    def of_masks(self, inputs: Batch) -> Iterator[Batch]:
        size = next(value for name, value in inputs.items() if name.startswith("pixel_values")).shape[-1]
        masks = [(self.noise(2 + index % 2, size, size) > 0).double() for index in range(SAMPLES)]
        kinds = [self.ints(CLASSES, 2 + index % 2) for index in range(SAMPLES)]
        yield {"mask_labels": masks, "class_labels": kinds}

    def of_images(self, inputs: Batch) -> Iterator[Batch]:
        height, width = next(value for name, value in inputs.items() if name.startswith("pixel")).shape[-2:]
        if "Detection" in self.kind or self.kind.endswith(("DetrForSegmentation", "InstanceSegmentation")):
            yield {"labels": [self.boxes(1 + index % 3, height) for index in range(SAMPLES)]}
        if "bool_masked_pos" in inputs:
            yield {"labels_flat": self.ints(TEXT_END, SAMPLES, int(inputs["bool_masked_pos"][0].sum()))}
        yield {"labels": self.ints(CLASSES, SAMPLES)}
        ragged = self.ints(CLASSES, SAMPLES, height, width)
        ragged[torch.arange(SAMPLES)[:, None] * 4 > torch.arange(height)] = 255
        yield {"labels": ragged}
        yield {"labels": self.ints(TEXT_END, SAMPLES, LENGTH, low=5).masked_fill(~self.kept, -100)}
        yield {"labels": self.noise(SAMPLES, height, width).abs() + 0.1}
        yield {"labels": self.noise(SAMPLES, CLASSES, height, width)}

    def boxes(self, number: int, size: int) -> Batch:
        """The boxes of an image, with a mask each."""
        centers = torch.rand(number, 2, generator=self.generator).double() * 0.4 + 0.3
        sizes = torch.rand(number, 2, generator=self.generator).double() * 0.3 + 0.2
        masks = (self.noise(number, size, size) > 0).double()
        kinds = self.ints(CLASSES, number)
        return {"class_labels": kinds, "boxes": torch.cat([centers, sizes], 1), "masks": masks}

    def of_texts(self, ids: Tensor) -> Iterator[Batch]:
        second = {name: self.ints(2, SAMPLES) for name in ("next_sentence_label", "sentence_order_label")}
        second = {name: value for name, value in second.items() if name in self.names}
        kept = self.kept
        if ids.shape[-1] > LENGTH:  # the places of images are no targets
            kept = torch.cat([torch.zeros(SAMPLES, ids.shape[-1] - LENGTH, dtype=torch.bool), kept], 1)
        words = self.ints(TEXT_END, *kept.shape, low=5).masked_fill(~kept, -100)
        if self.kind.endswith("MultipleChoice"):
            yield {"labels": self.ints(2, SAMPLES)}
        if "mc_labels" in self.names and ids.dim() == 3:
            labels = ids.masked_fill(~self.kept[:, None], -100)
            yield {"labels": labels, "mc_labels": self.ints(2, SAMPLES)}
        if self.kind.endswith(("SequenceClassification", "NextSentencePrediction")):
            yield {"labels": self.ints(2, SAMPLES)}
        if "SpadeEL" in self.kind:
            yield {"labels": self.ints(LENGTH, SAMPLES, LENGTH)}
        if "EntitySpan" in self.kind:
            yield {"labels": self.ints(CLASSES, SAMPLES, 3)}
        if self.kind.endswith("TokenClassification"):
            yield {"labels": self.ints(CLASSES, *kept.shape).masked_fill(~kept, -100), **second}
        if self.kind.startswith("Electra") and self.kind.endswith("PreTraining"):
            yield {"attention_mask": self.kept.long(), "labels": self.ints(2, SAMPLES, LENGTH)}
        yield from self.of_regions_or_speech({"labels": words, **second})
        if "Detection" in self.kind:
            yield {"labels": [self.boxes(1 + index % 3, 32) for index in range(SAMPLES)]}
        if self.kind.endswith("ImageSegmentation"):
            yield {"labels": (self.noise(SAMPLES, 32, 32) > 0).double()}
        yield {"labels": words, **second}
        yield {"labels": words.clamp(min=5), **second}  # heads that take them for what the decoder reads
        yield {"labels": self.ints(2, SAMPLES)}
        yield {"labels": self.noise(SAMPLES)}
        yield {"labels": torch.rand(SAMPLES, 2, generator=self.generator).double()}

    def of_regions_or_speech(self, texts: Batch) -> Iterator[Batch]:
        """Labels of a text with five regions of an image beside it, and sounds to be made with a speaker."""
        if "visual_embeds" in self.names:
            labels = torch.cat([texts["labels"], torch.full((SAMPLES, 5), -100)], 1)
            yield {**texts, "labels": labels}
            yield {"labels": torch.rand(SAMPLES, LENGTH, 5, generator=self.generator).double()}
        if self.kind.startswith("SpeechT5"):
            sounds = self.noise(SAMPLES, 2 * LENGTH, self.config.num_mel_bins)
            kept = self.kept.repeat_interleave(2, 1)[..., None]
            speakers = self.noise(SAMPLES, self.config.speaker_embedding_dim)
            yield {"labels": sounds.masked_fill(~kept, -100.0), "speaker_embeddings": speakers}

    def of_codebooks(self) -> Iterator[Batch]:
        """A target for each codebook of each step."""
        codes = self.ints(TEXT_END, SAMPLES, LENGTH, self.config.num_codebooks, low=5)
        yield {"labels": codes.masked_fill(~self.kept[..., None], -100)}

    def of_sounds(self) -> Iterator[Batch]:
        words = self.ints(TEXT_END, SAMPLES, LENGTH, low=5).masked_fill(~self.kept, -100)
        if self.kind.endswith("AudioClassification"):
            yield {"labels": self.ints(2, SAMPLES)}
        if self.kind.endswith("ForCTC"):
            yield {"labels": words[:, :6]}
        if self.kind.endswith("FrameClassification"):
            for frames in (61, 62, 60, 64, 63, 32, 31, 16):
                yield {"labels": nn.functional.one_hot(self.ints(CLASSES, SAMPLES, frames), CLASSES)}
        yield {"labels": words}
        yield {"labels": self.ints(CLASSES, SAMPLES)}
        yield {"labels": self.noise(SAMPLES)}


# by the names that must all be in `forward`
EXTRAS: tuple[tuple[str, Callable[[Batches, Batch], Batch]], ...] = (
    ("entity_position_ids entity_ids", Batches.entities),
    ("visual_feats", Batches.regions),
    ("visual_embeds", Batches.regions),
    ("past_values", Batches.series),
    ("target_values", lambda self, _: {"target_values": self.target_values()}),
    ("pixel_values bool_masked_pos", Batches.masked_patches),
    ("prompt_pixel_values", Batches.prompts),
    ("sampled_negative_indices", Batches.sampled_negatives),
    ("question_positions", Batches.questions),
    ("qformer_input_ids", lambda self, _: {"qformer_input_ids": self.ints(TEXT_END, SAMPLES, LENGTH)}),
    ("aspect_ratio_ids", lambda self, _: {"aspect_ratio_ids": torch.ones(SAMPLES, 1, dtype=torch.long)}),
    ("image_embeds_position_mask", Batches.image_places),
    ("image_attention_mask", Batches.images_seen),
    ("actions state", Batches.motions),
    ("pixel_values noise", Batches.order_of_patches),
    ("task_inputs", lambda self, _: {"task_inputs": self.ints(TEXT_END, SAMPLES, self.config.task_seq_len)}),
    ("text_inputs", lambda self, _: {"text_inputs": self.text_inputs()}),
    ("labels_input_ids", Batches.attacked),
    ("bbox_first_token_mask", Batches.first_tokens),
    ("flattened_patches", lambda self, _: {"flattened_patches": self.flattened_patches()}),
)
