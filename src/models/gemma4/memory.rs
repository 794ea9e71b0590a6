//! How much memory a model will take, from its configuration alone.

use super::cache::Cache;
use super::config::{Config, LayerConfig, LayerKind};
use super::layer_cache::capacity;
use super::matrix::HEAD_ROWS;
use super::path::AttentionPath;
use crate::attention::reference::{block_queries, BLOCK_SCORES};
use candle::DType;

/// What a model is to be run with; see [`MemoryPlan::new`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryDemand {
    /// Which ops attention runs on.
    pub path: AttentionPath,
    /// Type of the matrix products and the caches.
    pub dtype: DType,
    /// Whether it runs on the CPU, where candle multiplies bf16 by way of f32 copies of both sides, a weight or a cache whole.
    pub on_cpu: bool,
    /// Tokens of prompt and answer together.
    pub context: usize,
    /// Tokens that are fed at a time.
    pub chunk: usize,
    /// Bytes of the weights as they are held; `None` for all of them in `dtype`.
    pub weight_bytes: Option<u64>,
    /// Whether [`Cache::mark`] is called, as a conversation does.
    pub marks: bool,
}

/// Bytes of one sequence on one path, by what they are for.
///
/// While safetensors weights are loaded, the pages of the mapped files count as memory of the process too; the system takes
/// them back when it needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Of the model; each weight once.
    pub weights: u64,
    /// Caches of sliding layers.
    pub sliding_caches: u64,
    /// The copies of them that [`Cache::mark`] keeps.
    pub marks: u64,
    /// Caches of full layers.
    pub full_caches: u64,
    /// Rotary tables of every position, where keys are rebuilt.
    pub rotary_tables: u64,
    /// The most that the results of ops take at a time while a chunk is fed; or what going back to a mark copies, if that is more.
    pub activations: u64,
}

impl MemoryPlan {
    /// What `demand` takes of a model of this configuration. A context beyond the model's own is planned as that.
    pub fn new(config: &Config, demand: &MemoryDemand) -> Self {
        let MemoryDemand { path, dtype, .. } = *demand;
        let context = demand.context.min(config.max_position_embeddings);
        let (sliding, full) = Cache::planned_bytes(config, path, context, dtype);
        let marks = if demand.marks { sliding as u64 } else { 0 };
        Self {
            weights: demand
                .weight_bytes
                .unwrap_or_else(|| weight_bytes(config, dtype)),
            sliding_caches: sliding as u64,
            marks,
            full_caches: full as u64,
            rotary_tables: Cache::planned_table_bytes(config, path, context) as u64,
            // Going back makes the copies anew before it lets a layer go, and feeds nothing meanwhile.
            activations: activations(config, demand, context).max(marks),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        [
            self.weights,
            self.sliding_caches,
            self.marks,
            self.full_caches,
            self.rotary_tables,
            self.activations,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// The largest context, up to the model's own, whose total is at most `limit` bytes; `None` if not even one token fits.
    pub fn largest_context(config: &Config, demand: &MemoryDemand, limit: u64) -> Option<usize> {
        let fits = |context| {
            let demand = MemoryDemand { context, ..*demand };
            Self::new(config, &demand).total() <= limit
        };
        // Fits at `low`, not at `high`; a longer context never takes less.
        let (mut low, mut high) = (0, config.max_position_embeddings + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match fits(middle) {
                true => low = middle,
                false => high = middle,
            }
        }
        (low > 0).then_some(low)
    }
}

impl MemoryDemand {
    fn widens(&self) -> bool {
        self.on_cpu && self.dtype == DType::BF16
    }
}

fn weight_bytes(config: &Config, dtype: DType) -> u64 {
    let shapes = config.tensor_shapes();
    let elements: usize = shapes
        .iter()
        .map(|(_, s)| s.iter().product::<usize>())
        .sum();
    (elements * dtype.size_in_bytes()) as u64
}

/// The largest of the three places where a pass holds most: attention, MLP and head.
fn activations(config: &Config, demand: &MemoryDemand, context: usize) -> u64 {
    let (hidden, size) = (config.hidden_size, demand.dtype.size_in_bytes());
    let chunk = demand.chunk.min(context);
    let f32s = 4;
    // The residual stream before and after, and what the block reads, in the type of the weights.
    let stream = chunk * hidden * (2 * f32s + size);
    let inter = config.intermediate_size;
    let mlp = stream
        + match demand.widens() {
            // Gate, up and their product are f32.
            false => chunk * inter * 3 * f32s,
            // The last product: its input in f32, bf16 and f32 again, its weight, its output twice.
            true => {
                chunk * inter * (2 * f32s + size)
                    + hidden * inter * f32s
                    + chunk * hidden * (f32s + size)
            }
        };
    let attention = config
        .layers
        .iter()
        .map(|layer| {
            let held = of_attention(config, layer, demand, chunk, context);
            stream + held.max(of_projections(config, layer, demand, chunk))
        })
        .max()
        .unwrap_or(0);
    // Half precision is widened block by block, and the blocks are joined; then the soft cap.
    let head = match demand.dtype {
        DType::F32 => 0,
        _ => HEAD_ROWS.min(config.vocab_size) * hidden * f32s,
    };
    let logits = chunk * hidden * f32s + head + 3 * config.vocab_size * f32s;
    attention.max(mlp).max(logits) as u64
}

/// Of the largest projection around attention, where its weight is widened.
fn of_projections(
    config: &Config,
    layer: &LayerConfig,
    demand: &MemoryDemand,
    chunk: usize,
) -> usize {
    if !demand.widens() {
        return 0;
    }
    let fused = matches!(
        demand.path,
        AttentionPath::Fused | AttentionPath::FusedSharedKv
    );
    let tensors = if layer.value_is_key { 1 } else { 2 };
    let queries = config.num_attention_heads * layer.head_dim;
    // Plain ops multiply by blocks of one packed weight, which is widened whole.
    let rows = match fused {
        true => queries,
        false => queries + tensors * layer.num_key_value_heads * layer.head_dim,
    };
    let size = demand.dtype.size_in_bytes();
    rows * config.hidden_size * 4 + chunk * (config.hidden_size + 2 * rows) * (4 + size)
}

fn of_attention(
    config: &Config,
    layer: &LayerConfig,
    demand: &MemoryDemand,
    chunk: usize,
    context: usize,
) -> usize {
    let (size, f32s) = (demand.dtype.size_in_bytes(), 4);
    let fused = matches!(
        demand.path,
        AttentionPath::Fused | AttentionPath::FusedSharedKv
    );
    let queries = chunk * config.num_attention_heads * layer.head_dim;
    let keys = chunk * layer.num_key_value_heads * layer.head_dim;
    let tensors = if layer.value_is_key { 1 } else { 2 };
    // One product gives f32, plain ops the type of the weights.
    let raw = (queries + tensors * keys) * if fused { f32s } else { size };
    // Queries, keys and values as attention takes them, raw ones in f32 for the norms, and the result twice: by head, by token.
    let widened = if fused { 0 } else { tensors * keys * f32s };
    let normed = (queries + 2 * keys) * size + widened + 2 * queries * size;
    // Norm, heads apart, rotation: each a copy in f32, gone before there are scores.
    let rotation = 3 * queries * f32s;
    let seen = match layer.kind {
        LayerKind::Full if fused => return raw + normed + rotation,
        LayerKind::Full => context,
        // A ring that has wrapped is copied with the chunk behind it.
        LayerKind::Sliding { window } => context.min(window + chunk - 1),
    };
    let copied = match layer.kind {
        LayerKind::Full => 0,
        LayerKind::Sliding { .. } => 2 * seen * layer.num_key_value_heads * layer.head_dim * size,
    };
    let heads = config.num_attention_heads;
    let scores = match layer.kind {
        LayerKind::Full => block_queries(heads, seen).min(chunk) * seen,
        LayerKind::Sliding { window } => {
            let rows = block_queries(heads, seen).min(chunk);
            rows * seen.min(window + rows - 1)
        }
    };
    // The products of scores read the cache, the projections all rows that are packed with theirs.
    let widened_side = match (demand.widens(), layer.kind) {
        (false, _) => 0,
        (true, kind) => {
            let rows = match kind {
                LayerKind::Full => capacity(kind, context),
                LayerKind::Sliding { .. } => seen,
            };
            rows * layer.num_key_value_heads * layer.head_dim * f32s
        }
    };
    debug_assert!(scores * heads <= BLOCK_SCORES.max(heads * seen));
    // Raw, masked and softmaxed in f32; in half precision also as they come out of and go into products.
    let of_scores = match demand.dtype {
        DType::F32 => 3 * f32s,
        _ => 3 * f32s + 2 * size,
    };
    // One mask for all heads, made as a vector.
    raw + normed
        + copied
        + widened_side
        + (scores * heads * of_scores + scores * f32s).max(rotation)
}
