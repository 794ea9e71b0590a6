//! Names of tensors: what a checkpoint calls them after its prefix, and what a GGUF file calls them.

/// The frequency divisors of full layers, which no checkpoint has.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

const TOP: [(&str, &str); 3] = [
    ("embed_tokens.weight", "token_embd.weight"),
    ("norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

const IN_LAYER: [(&str, &str); 14] = [
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    (
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
    ),
    ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
];

/// The name in a GGUF file of a tensor of [`Config::tensor_shapes`](super::super::Config::tensor_shapes).
pub(super) fn in_gguf(name: &str) -> Option<String> {
    let find = |table: &[(&str, &str)], name: &str| {
        let found = table.iter().find(|(ours, _)| *ours == name);
        found.map(|(_, theirs)| theirs.to_string())
    };
    match name
        .strip_prefix("layers.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((layer, rest)) => Some(format!("blk.{layer}.{}", find(&IN_LAYER, rest)?)),
        None => find(&TOP, name),
    }
}
