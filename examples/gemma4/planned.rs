//! What a run will take, said before it is taken.

use crate::args::Args;
use crate::memory::human;
use candle::{DType, Device};
use gem::models::gemma4::{AttentionPath, Cache, Config};

pub fn say(
    args: &Args,
    config: &Config,
    path: AttentionPath,
    context: usize,
    dtype: DType,
    device: &Device,
    weights: usize,
) {
    // A comparison holds the caches of every path at once.
    let paths = match args.ab {
        true => AttentionPath::available(config, dtype, device),
        false => vec![path],
    };
    let (mut sliding, mut full, mut tables) = (0, 0, 0);
    for path in paths {
        let bytes = Cache::planned_bytes(config, path, context, dtype);
        (sliding, full) = (sliding + bytes.0, full + bytes.1);
        tables += Cache::planned_table_bytes(config, path, context);
    }
    let tables = match tables {
        0 => String::new(),
        bytes => format!(", rotary tables {}", human(bytes as u64)),
    };
    eprintln!(
        "planned memory: weights {}, caches {} ({} of it in full layers){tables} for {} tokens, {dtype:?}",
        human(weights as u64),
        human((sliding + full) as u64),
        human(full as u64),
        context
    );
}
