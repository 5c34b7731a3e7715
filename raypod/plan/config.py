"""The configuration of a run as immutable sections: `training` and `data` here, the others in `sections.py`.

Defaults are defined only in these files. `resolve` derives the numbers of replicas and instances; the plan derives all
other values.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Tuple, Type

import pydantic
import yaml
from pydantic import Field
from pydantic.fields import FieldInfo
from typing_extensions import Literal

from raypod.plan.sections import IpuSection, PodSection, RunSection, Section
from raypod.plan.values import (
    Betas,
    Counts,
    DataPath,
    Epochs,
    Evaluations,
    ImageShape,
    Names,
    Samples,
    Size,
    Splits,
)
from raypod.system.urls import is_url

MANIFEST = "manifest.json"  # its presence makes a folder a checkpoint
SMALL_RESNETS = ("resnet8", "resnet14", "resnet20")
TORCHVISION_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
VISION_TRANSFORMERS = ("vit_tiny", "vit_small", "vit_b_16")
EFFICIENTNETS = ("efficientnet_b0", "efficientnet_b4")
MOBILE_NETWORKS = (*EFFICIENTNETS, "mobilenet_v3_small", "mobilenet_v3_large")
TIMM, TORCHVISION = "timm:", "torchvision:"  # begin the name of a model of that package
HF = "hf:"  # before the folder of a model of transformers
LIBRARIES = (TIMM, TORCHVISION, HF)
IMAGE_FOLDERS = ("imagefolder", "imagenet")  # data sets
SHARDS = "shards"  # the data set of what `raypod pack --dataset` has written
DOWNLOADED = ("cifar10", "cifar100")  # data sets with --download
WITHOUT_FILES = ("digits", "synthetic")  # data sets that read no folder
MAX_IMAGE_PIXELS = 89_478_485  # of an image file, as Pillow's own limit: 268 MB as RGB
STREAM_WINDOW = 16  # default of `data.shuffle_window` with a URL
IMAGE_SIDE = 224  # default height and width of the images of folders
BOXES = "+"  # in a data fingerprint, before the hash of bounding boxes
CONTENTS = "-"  # in a data fingerprint, between the hash of names and labels and that of the contents of files
TEST_SAMPLE = "test:"  # before the number of a test sample in `data.leave_out`
_EMA_SHARE = 0.1  # of the average that an addition changes at most, unless it is due after every call
IMAGE_CLASSIFICATION, LANGUAGE_MODEL = "image-classification", "language-model"
HF_CAUSAL_LM, HF_MASKED_LM, HF_SEQUENCES = "hf-causal-lm", "hf-masked-lm", "hf-sequence-classification"
HF_TOKENS, HF_IMAGES = "hf-token-classification", "hf-image-classification"
HF_TASKS = (HF_CAUSAL_LM, HF_MASKED_LM, HF_SEQUENCES, HF_TOKENS, HF_IMAGES)
WINDOW_TASKS = (LANGUAGE_MODEL, HF_CAUSAL_LM, HF_MASKED_LM)  # whose samples are windows of a text
IMAGE_TASKS = (IMAGE_CLASSIFICATION, HF_IMAGES)
RANGE_TEST = "range-test"  # the schedule of `raypod lr-range`
LR_SCHEDULES = ("constant", "step", "exponential", "linear", "cosine", "polynomial", RANGE_TEST)
_FORMER_RANGE_TESTS = ("raypod.cli.lr_range:factor", "raypod.commands.lr_range:factor")  # in older run folders


class TaskOptions(Section):
    """Base class of a task's own options. Each field has a default, and the help text of its flag as description."""


class TaskSection(pydantic.BaseModel):
    """The task; further keys are its options, as plain data that the `TaskOptions` of the task have validated."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    name: str = Field(
        IMAGE_CLASSIFICATION,
        description="what is trained: image-classification, language-model, hf-causal-lm, hf-masked-lm, "
        "hf-sequence-classification, hf-token-classification, hf-image-classification, or module:Class for your own "
        "task",
    )

    @property
    def options(self) -> Dict[str, Any]:
        """The options by name."""
        return dict(self.model_extra or {})


class DataSection(Section):
    """The data set and its loading."""

    dataset: str = Field(
        "digits",
        description="digits, synthetic, cifar10, cifar100, imagefolder, imagenet, shards, or module:function, as in "
        "mine:load with def load(data_dir): return train, test, classes",
    )
    data_dir: DataPath = Field(
        None,
        description="folder of the data set's files, or the URL of what raypod pack has written, as in "
        "s3://bucket/prefix, which replaces the data sets of a task; passed to module:function",
    )
    download: bool = Field(False, description="download the files of cifar10 or cifar100 if they are missing")
    cache_dir: Optional[str] = Field(
        None,
        description="folder of decoded data (default: in the data folder), and of downloaded shards (default: "
        "~/.cache/raypod)",
    )
    cache_size: Size = Field("50GB", description="most that the shards of a URL may occupy on a host, as 50GB")
    shuffle_window: Optional[int] = Field(
        None,
        ge=1,
        description="shards whose samples are shuffled together, of data that raypod pack has written (default: all; "
        f"{STREAM_WINDOW} with a URL)",
    )
    samples: int = Field(4096, ge=1, description="number of samples of the synthetic data set")
    image: ImageShape = Field("3x32x32", description="CxHxW of the synthetic images")
    classes: int = Field(10, ge=2, description="number of classes of the synthetic data set")
    augment: bool = Field(True, description="randomly crop and flip training images, as is usual for the data set")
    crop_padding: Optional[int] = Field(None, ge=0, description="maximum shift of an augmented image in pixels")
    flip: Optional[bool] = Field(None, description="flip augmented images horizontally with probability 0.5")
    bounding_boxes: Optional[str] = Field(
        None,
        description="CSV file with lines NAME,x1,y1,x2,y2 of training images, 0 to 1: random crops of imagefolder and "
        "imagenet are drawn up to 10 times, until the box covers 10 % of one",
    )
    policy: Optional[Literal["rand-augment", "auto-augment"]] = Field(
        None, description="torchvision's policy that further changes training images of imagefolder and imagenet"
    )
    rand_augment_ops: int = Field(2, ge=1, description="rand-augment: operations per image")
    rand_augment_magnitude: int = Field(9, ge=0, le=30, description="rand-augment: strength of the operations")
    random_erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a rectangle of a training image becomes the mean color; imagefolder and imagenet",
    )
    mixup_alpha: float = Field(
        0.0, ge=0, le=1, description="mix each training image with another one by Beta(alpha, alpha); 0: no mixup"
    )
    cutmix_lambda_low: float = Field(
        0.0, ge=0, le=1, description="smallest share of a training image into which cutmix pastes another one"
    )
    cutmix_lambda_high: float = Field(
        0.0, ge=0, le=1, description="largest share; cutmix is off if both are 0, or both are 1"
    )
    cutmix_disable_prob: float = Field(0.0, ge=0, le=1, description="probability that cutmix leaves an image as it is")
    image_size: Optional[int] = Field(
        None,
        ge=1,
        le=16_384,
        description="height and width to which images are resized (default: 224 for imagefolder and imagenet)",
    )
    jpeg_decoder: Literal["pillow", "simplejpeg"] = Field(
        "pillow", description="decoder of the images of imagefolder and imagenet; simplejpeg is faster, other bits"
    )
    max_image_pixels: int = Field(
        MAX_IMAGE_PIXELS, ge=1, description="an image file with more pixels is an error, before it is decoded"
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="loader processes per instance (threads for data in memory; on IPUs always processes, at least 1)",
    )
    async_dataloader: bool = Field(False, description="prepare the data of the next calls in the background")
    leave_out: Samples = Field(
        None,
        description="samples that are not used, as in 17,208,test:3: the next one takes the place of a training sample",
    )
    eight_bit_io: bool = Field(False, description="transfer images as uint8 and normalize them on the device")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _window_of_stream(cls, values: Any) -> Any:
        """Return the values with the window of data at a URL: a copy of them elsewhere has the same order then."""
        if not isinstance(values, dict):
            return values
        # The shards of a task have no data set. One of images that reads no files rejects any data folder.
        if values.get("dataset", WITHOUT_FILES[0]) not in (*IMAGE_FOLDERS, SHARDS, *WITHOUT_FILES):
            return values
        is_stream = is_url(str(values.get("data_dir") or "")) and values.get("shuffle_window") is None
        return {**values, "shuffle_window": STREAM_WINDOW} if is_stream else values

    @property
    def has_cutmix(self) -> bool:
        """Whether training images get rectangles of others."""
        return self.cutmix_lambda_high > 0 and self.cutmix_lambda_low < 1

    @property
    def first_sample(self) -> int:
        """The first training sample that is not left out."""
        left_out = self.left_out("train")
        return next(index for index in range(len(left_out) + 1) if index not in left_out)

    def left_out(self, split: str) -> Tuple[int, ...]:
        """Return the samples of a split, "train" or "test", that are not used, in ascending order."""
        of_split = [each for each in self.leave_out or () if each.startswith(TEST_SAMPLE) == (split == "test")]
        return tuple(sorted(int(each.rpartition(":")[2]) for each in of_split))


class TrainingSection(Section):
    """The model, the batch sizes, the optimizer and the length of the training."""

    model: str = Field(
        "resnet8",
        description="resnet8/14/20, resnet18/34/50/101/152, vit_tiny/small/b_16, efficientnet_b0/b4, "
        "mobilenet_v3_small/large, tiny, torchvision:NAME, timm:NAME, hf:FOLDER (tasks hf-...), or "
        "module:function, as in nets:make with def make(channels, classes): return Net(channels, classes)",
    )
    stem: Literal["auto", "cifar", "imagenet"] = Field(
        "auto", description="first layers of ResNets; auto: by the image size"
    )
    norm: Literal["batch", "group", "frozen"] = Field("batch", description="layer used in place of every BatchNorm2d")
    norm_num_groups: Optional[int] = Field(None, ge=1, description="groups of group norms (default: 32)")
    norm_eps: Optional[float] = Field(
        None, gt=0, allow_inf_nan=False, description="term of the denominator of group norms (default: 1e-5)"
    )
    zero_init_residual: bool = Field(
        False, description="ResNets from resnet18 on: the last norm of a residual branch starts with weight 0"
    )
    efficientnet_expand_ratio: int = Field(
        6, ge=1, description="factor by which the blocks of EfficientNets expand their channels"
    )
    efficientnet_group_dim: int = Field(
        1, ge=1, description="channels per group of the depthwise convolutions of EfficientNets, as 16 for IPUs"
    )
    vit_dropout: float = Field(0.0, ge=0, lt=1, description="vision transformers: dropout of embeddings and layers")
    vit_attention_dropout: float = Field(
        0.0, ge=0, lt=1, description="vision transformers: dropout of the attention's probabilities"
    )
    vit_representation_size: Optional[int] = Field(
        None, ge=1, description="vision transformers: width of a layer before the classifier (default: no such layer)"
    )
    pipeline_splits: Splits = Field(
        None,
        description="modules at which the next IPU begins, as in layer2.0,layer3.8; MODULE=IPU begins a stage on an "
        "IPU, which may be an earlier one",
    )
    pipeline_balance: Optional[Literal["parameters", "time", "memory"]] = Field(
        None,
        description="split a model automatically, balanced by parameters, by measured time, or by the estimated memory "
        "with activations",
    )
    layers_per_ipu: Counts = Field(
        None,
        description="layers of a transformer on each IPU, as in 3,4,4,1, or one number for all; the modules before "
        "them are on the first one, those after them on the last one",
    )
    execution: Literal["pipelined", "sharded"] = Field(
        "pipelined", description="the IPUs of a replica run at the same time, or one after the other"
    )
    precision: Literal["16.16", "16.32", "32.32"] = Field("32.32", description="bits of activations and weights")
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        "auto",
        description="layout of images and convolution weights on the emulated SDK; auto: by the model. An IPU's "
        "compiler chooses its own",
    )
    batch_size: int = Field(8, ge=1, description="micro-batch size: samples per forward pass")
    gradient_accumulation: int = Field(1, ge=1, description="micro-batches per replica and update")
    device_iterations: int = Field(1, ge=1, description="weight updates per call")
    epochs: int = Field(15, ge=1, le=100_000, description="passes over the training split")
    updates: Optional[int] = Field(None, ge=1, description="stop after this many updates")
    optimizer: Literal["sgd", "adam", "adamw", "lamb", "rmsprop"] = Field("sgd", description="poptorch.optim class")
    learning_rate: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="peak learning rate; the default is that of sgd for 32 samples per update (adam, adamw, rmsprop: "
        "0.001, lamb: 0.01), and is scaled linearly with them, at most 4-fold",
    )
    lr_schedule: str = Field(
        "cosine",
        description="learning rate over the whole run: constant, step, exponential, linear, cosine, polynomial, "
        "range-test, or module:function, a factor of the rate, as in rates:halve with def halve(update, "
        "total_updates): return 0.5 ** (5 * update / total_updates)",
    )
    lr_floor: float = Field(
        0.0, ge=0, le=1, description="linear, cosine, polynomial: rate at the end, as a fraction of the peak rate"
    )
    lr_power: float = Field(1.0, gt=0, le=100, description="polynomial schedule: exponent of the remaining fraction")
    lr_steps: Epochs = Field(None, description="step schedule: epochs after which the rate drops, as in 30,60,80")
    lr_gamma: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="step schedule: factor of a drop; exponential: of an epoch, or of a step of --lr-frequency",
    )
    lr_frequency: Optional[float] = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="steps of the schedule per epoch, between which the rate is constant, as in 16 or 0.424 (default: "
        "one per update)",
    )
    warmup_updates: int = Field(20, ge=0, description="updates of linear warm-up (0 for range-test, module:function)")
    init_weights: Optional[str] = Field(
        None,
        description="weights to start from: a safetensors file, a .pt state dict, a run folder (its best checkpoint, "
        "else its newest), or a checkpoint",
    )
    init_ignore: Names = Field(
        None, description="names that --init-weights leaves at their initialization, as in head.*"
    )
    freeze: Names = Field(None, description="parameters or modules that are not trained, as in features.*,layer1")
    ema: Optional[float] = Field(
        None,
        gt=0,
        lt=1,
        description="decay per update of the moving average of the weights, which is evaluated, as in 0.999",
    )
    ema_every: Optional[int] = Field(
        None,
        ge=1,
        description="updates between two additions of the weights to the average, which read them back (default: as "
        "many as change a tenth of it)",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD and RMSprop")
    combined_accumulator: bool = Field(
        False,
        description="use_combined_accum of SGD: one tensor for the gradients and the velocity, to save memory; less "
        "stable in half",
    )
    velocity_scaling: Optional[float] = Field(
        None, gt=0, allow_inf_nan=False, description="factor of a combined velocity (default: --loss-scaling)"
    )
    betas: Betas = Field(
        None, description="adam, adamw, lamb: decay of the two moments, as in 0.9,0.98 (default: 0.9,0.999)"
    )
    eps: Optional[float] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="adam, adamw, lamb, rmsprop: term of the denominator (default: 1e-8)",
    )
    bias_correction: Optional[bool] = Field(
        None, description="adamw, lamb: correct the moments of the first updates (default: yes)"
    )
    max_weight_norm: Optional[float] = Field(
        None, gt=0, allow_inf_nan=False, description="lamb: bound of the norm of a weight (default: 65500)"
    )
    max_bias_norm: Optional[float] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="lamb: the same bound for biases and norms (one dimension); 0: Adam's steps, independent of the "
        "norm (default: --max-weight-norm)",
    )
    rmsprop_alpha: Optional[float] = Field(
        None, ge=0, lt=1, description="rmsprop: decay of the squared gradients (default: 0.99)"
    )
    rmsprop_tf: bool = Field(
        False, description="use_tf_variant of RMSprop: as TensorFlow, with which EfficientNet and MobileNet are trained"
    )
    weight_decay: float = Field(
        5e-4, ge=0, allow_inf_nan=False, description="weight decay of parameters with more than one dimension"
    )
    max_grad_norm: Optional[float] = Field(
        None, gt=0, allow_inf_nan=False, description="clip the norm of all gradients together: sgd, adam, adamw"
    )
    loss_scaling: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="factor of the loss, divided out before the update"
    )
    initial_loss_scaling: Optional[float] = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="loss scaling of the first epochs, which doubles at equal intervals until --loss-scaling",
    )
    reduction: Literal["sum", "mean"] = Field(
        "mean", description="how gradients are combined over micro-batches and replicas"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of a label that is spread over all classes")
    evaluate_every: Optional[int] = Field(
        None, ge=1, description="epochs between evaluations; the last update is always evaluated"
    )
    early_stopping: Evaluations = Field(
        None, description="end the run after so many evaluations in a row without improvement, as in 5 evaluations"
    )
    early_stopping_metric: Optional[str] = Field(
        None, description="test metric that must improve, as in loss (default: that of --best-metric)"
    )
    evaluation_iterations: Optional[int] = Field(
        None,
        ge=1,
        le=65_536,
        description="device iterations of an evaluation call (default: the minimum of the pipeline)",
    )
    seed: int = Field(42, ge=0, lt=2**31, description="seed of weights, sample order, augmentation and dropout")

    @property
    def has_own_model(self) -> bool:
        """Whether the model is a function of the user."""
        return ":" in self.model and not self.model.startswith(LIBRARIES)

    @property
    def ema_interval(self) -> int:
        """The updates between two additions to the average, a number of whole calls; 0 without `ema`."""
        if self.ema is None:
            return 0
        calls = int(_EMA_SHARE / (1 - self.ema) / self.device_iterations + 1e-6)  # 0.99: 10, in spite of its rounding
        return self.ema_every or max(1, calls) * self.device_iterations

    @pydantic.field_validator("model")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known = ("tiny", *SMALL_RESNETS, *TORCHVISION_RESNETS, *VISION_TRANSFORMERS, *MOBILE_NETWORKS)
        if value not in known and ":" not in value:
            others = "torchvision:NAME, timm:NAME, hf:FOLDER, or module:function for a custom model"
            raise ValueError(f"known are {', '.join(known)}, {others}")
        library, _, name = value.partition(":")
        if value == HF:
            raise ValueError("write hf: and the folder of a model of transformers, as in hf:models/bert")
        if value.startswith((TIMM, TORCHVISION)) and (":" in name or not name):
            raise ValueError(f"write {library}: and the name of a model of {library}, as in {library}:convnext_tiny")
        return value

    @pydantic.field_validator("lr_schedule")
    @classmethod
    def _is_a_schedule(cls, value: str) -> str:
        if value not in LR_SCHEDULES and ":" not in value:
            raise ValueError(f"known are {', '.join(LR_SCHEDULES)}, or module:function for a custom one")
        return RANGE_TEST if value in _FORMER_RANGE_TESTS else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_warmup(cls, values: Any) -> Any:
        """Return the values without warm-up for a custom schedule or a range test, unless they contain one."""
        schedule = str(values.get("lr_schedule", "")) if isinstance(values, dict) else ""
        return {"warmup_updates": 0, **values} if ":" in schedule or schedule == RANGE_TEST else values

    @pydantic.field_validator("precision", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> str:
        return str(value)  # YAML parses 16.16 as a float


class Config(pydantic.BaseModel):
    """All sections. `Config()` is the default run."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    ipu: IpuSection = IpuSection()
    pod: PodSection = PodSection()
    run: RunSection = RunSection()

    @property
    def stops_if_not_finite(self) -> bool:
        """Whether a loss that is NaN or infinite ends the run; with synthetic data the device returns none."""
        return self.run.on_nonfinite == "stop" and not self.ipu.synthetic_data_on_device

    @property
    def names(self) -> Tuple[str, ...]:
        """What is trained: the data set and the model of images; otherwise the task, which determines both."""
        if self.task.name in IMAGE_TASKS:
            return self.data.dataset, self.training.model
        return (self.task.name,)

    @property
    def model_name(self) -> str:
        """The model of images; otherwise the task. It may be `module:name`."""
        return self.names[-1]

    @property
    def decoder(self) -> Optional[str]:
        """The package that decodes images each time they are loaded; None for other data."""
        decodes = self.task.name in IMAGE_TASKS and self.data.dataset in IMAGE_FOLDERS
        return self.data.jpeg_decoder if decodes else None

    @property
    def reads_shards(self) -> bool:
        """Whether the data can be what `raypod pack` has written."""
        if self.task.name in IMAGE_TASKS:
            return self.data.dataset in (*IMAGE_FOLDERS, SHARDS)
        return self.data.data_dir is not None

    @property
    def image_side(self) -> Optional[int]:
        """The height and width of the images that a folder of images is cropped to; None for other data."""
        return None if self.decoder is None else self.data.image_size or IMAGE_SIDE

    def to_yaml(self) -> str:
        """Return the YAML text from which `resolve` restores an equal object."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def fields(options: Type[TaskOptions] = TaskOptions) -> Iterator[Tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) of every key, with the options of a task.

    Keys are unique over all sections, so that flags need no section; the flag of `task.name` is `--task`.
    """
    for section, info in Config.model_fields.items():
        kind = info.annotation
        assert kind is not None
        for model in (kind, options) if section == "task" else (kind,):
            for key, field in model.model_fields.items():
                yield section, key, field
