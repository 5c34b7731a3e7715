"""The operators of PopTorch 3.4, by their aten names: those that its dispatcher takes or its compiler lowers.

The names are those of its documentation ("IPU supported operations") and of the handlers in its sources.
"""

from __future__ import annotations

# An operator that PopTorch lowers; the in-place and `out` variants have the same name.
LOWERED = """
__and__ __or__ __xor__ _cdist_forward _convolution _embedding_bag _log_softmax _prelu_kernel _reshape_alias
_softmax _unsafe_view _weight_norm abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
add addcdiv addcmul addmm addmv all amax amin any arange argmax argmin argsort as_strided asin asinh atan atan2
atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bernoulli bilinear binary_cross_entropy
binary_cross_entropy_with_logits bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to
bucketize cartesian_prod cat cdist ceil celu chunk clamp clamp_max clamp_min clone col2im constant_pad_nd
contiguous conv2d convolution copy cos cosh cosine_embedding_loss cosine_similarity count_nonzero cross
cross_entropy_loss ctc_loss cumprod cumsum detach div dot dropout einsum elu embedding embedding_bag eq erf erfc
exp expand expand_as expm1 exponential feature_dropout flatten flip floor floor_divide fmod frac frobenius_norm
full full_like gather ge gelu glu group_norm gru gt hardshrink hardsigmoid hardswish hardtanh
hinge_embedding_loss im2col index index_fill index_put index_reduce index_select instance_norm isnan kl_div
l1_loss layer_norm le leaky_relu linalg_cross linalg_vector_norm linear log log10 log1p log2 log_sigmoid
log_sigmoid_forward log_softmax logical_and logical_not logical_or logsumexp lstm lt margin_ranking_loss
masked_fill matmul max max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices maximum mean median meshgrid min minimum mish mkldnn_convolution mm mse_loss mul
multilabel_soft_margin_loss mv nansum narrow native_batch_norm native_group_norm native_layer_norm ne neg
new_full new_ones new_zeros nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd norm normal one_hot ones
ones_like pairwise_distance permute pixel_shuffle poisson_nll_loss pow prelu prod rand randint randn random
randperm reciprocal reflection_pad1d reflection_pad2d relu remainder repeat replication_pad1d replication_pad2d
replication_pad3d reshape rnn_relu rnn_tanh roll round rrelu rrelu_with_noise rsqrt rsub scatter scatter_add
scatter_reduce select selu sigmoid sign silu sin sinh slice smooth_l1_loss soft_margin_loss softmax softplus
softshrink sort split split_with_sizes sqrt square squeeze stack std std_mean sub sum t take_along_dim tan tanh
tensordot threshold to topk transpose triplet_margin_loss true_divide trunc type_as unbind unfold uniform
unsafe_chunk unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_nearest1d
upsample_nearest2d upsample_nearest3d var var_mean view where zeros zeros_like
"""

# Operators that torch itself decomposes into lowered ones before PopTorch meets them (inferred: from torch's dispatch
# table), or that need no lowering as they only create or rename tensors.
DECOMPOSED = """
_euclidean_dist _index_put_impl _is_all_true _is_any_true _reshape_copy _stack _to_copy _unsafe_index addr alias
affine_grid_generator block_diag deg2rad diagonal dist empty empty_like empty_strided eye fill isinf lift lift_fresh
linspace logspace new_empty new_empty_strided rad2deg rand_like randint_like randn_like range rot90 scalar_tensor
slice_scatter unsafe_split unsafe_split_with_sizes zero pixel_unshuffle channel_shuffle native_channel_shuffle
diag_embed detach_copy
"""

# Kernels of torch for the CPU, which stand for operators that PopTorch lowers under another name.
CPU_KERNELS = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _cdist_forward _embedding_bag_forward_only
_fused_sdp_choice _native_batch_norm_legit _native_batch_norm_legit_no_training _native_multi_head_attention
_safe_softmax _transformer_encoder_layer_fwd _weight_norm_interface max_pool3d_with_indices mkldnn_linear
native_dropout native_norm norm_except_dim
"""

_OTHER_LIBRARIES = frozenset(
    (
        "torch_cluster::grid",
        "torch_scatter::scatter_max",
        "torch_scatter::scatter_min",
        "torch_scatter::scatter_mul",
        "torch_spline_conv::spline_basis",
        "torch_spline_conv::spline_weighting",
    )
)
_PREFIXES = ("poptorch::", "aten::_scaled_dot_product_")

SUPPORTED = _OTHER_LIBRARIES.union(f"aten::{name}" for name in f"{LOWERED}{DECOMPOSED}{CPU_KERNELS}".split())


def base_name(operator: str) -> str:
    """Return the name of an operator without the underscore of its in-place variant."""
    return operator[:-1] if operator.endswith("_") and not operator.endswith("__") else operator


def is_supported(operator: str) -> bool:
    """Return whether PopTorch runs an operator, given as "namespace::name", on an IPU."""
    return base_name(operator) in SUPPORTED or operator in SUPPORTED or operator.startswith(_PREFIXES)
