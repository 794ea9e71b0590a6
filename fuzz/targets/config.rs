//! The text of a `config.json`: an error, or a model whose shapes and memory can be told.
#![no_main]

use candle::DType;
use gem::models::gemma4::{AttentionPath, Config, MemoryDemand, MemoryPlan, StopTokens};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(config) = Config::from_json(text) else {
        return;
    };
    for (name, shape) in config.tensor_shapes() {
        let elements = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
        assert!(elements.is_some_and(|n| n > 0), "{name} {shape:?}");
    }
    let longest = config.max_position_embeddings;
    for (path, dtype, context, chunk, marks) in [
        (AttentionPath::Reference, DType::BF16, longest, longest, true),
        (AttentionPath::Fused, DType::F32, usize::MAX, 1, false),
        (AttentionPath::FusedSharedKv, DType::F16, 1, 512, true),
    ] {
        let demand = MemoryDemand {
            path,
            dtype,
            on_cpu: true,
            context,
            chunk,
            weight_bytes: None,
            marks,
        };
        let plan = MemoryPlan::new(&config, &demand);
        let demand = MemoryDemand {
            weight_bytes: Some(plan.weights),
            ..demand
        };
        let fits = MemoryPlan::largest_context(&config, &demand, plan.total());
        assert!(
            fits >= Some(context.min(longest)),
            "{fits:?} of {context} tokens fit into their own plan {plan:?}"
        );
    }
    // The other file that is read with these rules.
    let stop = StopTokens::new(&config, Some(text));
    assert!(
        stop.is_err()
            || config
                .eos_token_ids
                .iter()
                .all(|id| stop.as_ref().is_ok_and(|s| s.contains(*id)))
    );
});
