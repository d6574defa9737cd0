"""Rules across sections for images."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator
from dataclasses import replace

from titan_launch.config.image_format import DIGITS, misfits
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.paths import SKLEARN_DIGITS, LinkError, class_folders, images_named, tar_shards
from titan_launch.config.rules.data import pairs_of, sources_with
from titan_launch.config.sections.data import ImageData, MixtureData
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.core.errors import Problem, format_key, listed
from titan_launch.core.terminal import shortened
from titan_launch.models.architectures import images_taken, known_args
from titan_launch.models.huggingface.args import label_names


def image_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each `path` to images that names no images or cannot be read."""
    for source, data in sources_with(config, ImageData):
        try:
            reason = _why_no_images(data.path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}; correct this, or name other images"
        if reason is not None:
            yield Problem((*source, "path"), reason, data.path, also=((*source, "kind"),))


def image_keys_have_an_effect(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each key of images that contradicts another key, or has no effect."""
    for source, data in sources_with(config, ImageData):
        reasons = {
            "augment": _why_not_augment(data, is_training=source[0] == "data"),
            "padding": data.padding
            and "crop" not in data.augment
            and 'has no effect without "crop" in augment; add "crop", or remove padding',
            "label_field": data.label_field is not None
            and images_named(data.path) != "shards"
            and "is only for WebDataset shards, whose path ends in .tar; remove the key",
        }
        for name, value in data.changed(*reasons):
            if reason := reasons[name]:
                also = tuple((*source, other) for other in ("kind", "path", "crop", "augment") if other != name)
                yield Problem((*source, name), reason, value, also)


def class_folders_are_the_same(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each folder of images whose class folders differ from those of the previous folder of
    images. The same label would then mean different classes."""
    used = ((key, data) for key, data in sources_with(config, ImageData) if key[0] == "data" or config.validation.freq)
    images = [(key, data, _classes_of(data)) for key, data in used]
    for (first, _, theirs), (key, data, ours) in itertools.pairwise(filter(operator.itemgetter(2), images)):
        if ours != theirs:
            differences = (("lacks", theirs - ours), ("also has", ours - theirs))
            found = " and ".join(f"{verb} {listed(sorted(names))}" for verb, names in differences if names)
            wanted = f"the same class folders as {format_key((*first, 'path'))}, so that labels mean the same"
            yield Problem(
                (*key, "path"),
                f"must have {wanted}, but it {found}",
                data.path,
                also=((*first, "path"), (*first, "kind")),
            )


def class_folders_have_the_order_of_the_model(config: JobConfig) -> Iterator[Problem]:
    """For a class of `transformers`, report a problem for each folder of images whose class folders are the names in
    `id2label`, but sort in another order. The outputs of the model would then have wrong names."""
    names = label_names(config.model.args) if config.model.name == HUGGINGFACE else []
    for source, data in sources_with(config, ImageData):
        folders = sorted(_classes_of(data))
        if folders != names and folders == sorted(names):
            number = next(number for number, name in enumerate(names) if folders[number] != name)
            ours, theirs = listed([folders[number]]), listed([names[number]])
            orders = f"its class folder {ours} is class {number}, which is {theirs} in model.args.id2label"
            remedy = "rename the folders so that they sort in the order of id2label, or, for a new output layer, set"
            also_excluded = " and model.exclude_from_weights" if config.model.weights else ""
            reason = f"{orders}; {remedy} model.args.num_labels = {len(names)}{also_excluded}"
            yield Problem((*source, "path"), reason, data.path, also=(("model",),))


def digits_suit_the_model(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each difference between the images of `sklearn-digits` and the images that the model takes.
    (A run checks other images, and images with a `transform`, when it reads them.)"""
    taken = images_taken(config.model) if known_args(config.model) or not config.model.is_of_package else None
    for source, data in sources_with(config, ImageData):
        if taken is not None and data.path == SKLEARN_DIGITS and not data.transform:
            side = data.crop or data.resize or DIGITS.height
            for reason in misfits(replace(DIGITS, height=side, width=side), taken):
                yield Problem((*source, "path"), reason, data.path, also=(("model",), (*source, "kind")))


def validation_images_are_normalized_as_in_training(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `mean` or `std` of the validation images differs from that of the training images. In a
    mixture, only images of the same `path` are compared."""
    for (train_key, train), (key, held_out) in pairs_of(config, ImageData):
        if isinstance(config.data, MixtureData) and train.path != held_out.path:
            continue
        for name, ours, theirs in (("mean", held_out.mean, train.mean), ("std", held_out.std, train.std)):
            if ours != theirs:
                wanted = f"{format_key((*train_key, name))} ({toml_value(theirs)})"
                reason = f"must equal {wanted}, so that training and validation normalize images equally"
                yield Problem((*key, name), reason, ours, also=((*train_key, name), (*train_key, "kind")))


def images_are_normalized_as_for_the_weights(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the job does not set `mean` or `std`, and the folder `model.weights` has other values than
    the default. (A job that sets the key may use values of its own.)"""
    weights, key = config.model.weights, ("model", "weights")
    if weights is None or config.data.unit != "images":
        return
    from titan_launch.models.huggingface.files import WeightsError
    from titan_launch.models.huggingface.image_processor import FILE, read_image_keys

    try:
        keys = read_image_keys(weights)
    except WeightsError as error:
        yield Problem(key, str(error), weights)
        return
    for source, data in sources_with(config, ImageData):
        for name, default in (("mean", data.mean), ("std", data.std)):
            if name not in data.model_fields_set and set(keys.get(name, [default])) != {default}:
                values = toml_value(keys[name])
                reason = f"must be set: {weights}/{FILE} has image_{name} = {values}, but the default is {default}"
                yield Problem((*source, name), f"{reason}; set {values}", also=(key, (*source, "kind")))


IMAGE_RULES = (
    image_files_exist,
    image_keys_have_an_effect,
    class_folders_are_the_same,
    class_folders_have_the_order_of_the_model,
    digits_suit_the_model,
    validation_images_are_normalized_as_in_training,
    images_are_normalized_as_for_the_weights,
)


def _why_not_augment(data: ImageData, is_training: bool) -> str | None:
    if not is_training:
        return "applies only to training data; remove the key"
    if len(set(data.augment)) < len(data.augment) or {"crop", "resized_crop"} <= set(data.augment):
        return "must list each entry once, and not both crop and resized_crop"
    if data.crop is None and ("resized_crop" in data.augment or ("crop" in data.augment and not data.padding)):
        return "needs the key crop, the size of the random part in pixels; set it"
    return None


def _classes_of(data: ImageData) -> set[str]:
    """Return the names of the class folders in a folder of images; an empty set for any other path, and for an
    unreadable folder."""
    try:
        return set(class_folders(data.path)) if images_named(data.path) == "folder" else set()
    except OSError:
        return set()  # `image_files_exist` reports the error


def _why_no_images(path: str) -> str | None:
    """Return the reason why a path names no images; None if it names images. Raises OSError for an unreadable
    folder."""
    match images_named(path):
        case "folder" if not class_folders(path):
            has_shards = any(name.endswith(".tar") for name in os.listdir(path))
            shards = os.path.join(path, "*.tar")
            remedy = f'name the shards: "{shards}"' if has_shards else "put the images of each class into a folder"
            return f"contains no class folders; {remedy}"
        case "shards":
            try:
                tar_shards(path)
            except FileNotFoundError as error:
                return f"no file matches {shortened(str(error))} (paths are relative to the working directory)"
            except ValueError as error:
                return f"{error}; name fewer"
            except LinkError as error:
                return str(error)
        case "npz" if not os.path.isfile(path):
            return (
                f'must be "{SKLEARN_DIGITS}", or an existing folder of class folders, .npz file or .tar shards (paths '
                "are relative to the working directory)"
            )
    return None
