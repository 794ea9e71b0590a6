//! Views that repeat one row so often that no machine has the memory for what they ask: an error, not the end of the process.

use candle::{DType, Device, Result, Tensor};
use gem::attention::reference::{attention, Visible};
use gem::attention::{AttentionPartials, RotaryKeys, RotaryTables};
use gem::models::gemma4::{LayerCache, LayerKind};
use gem::{attention_d512, attention_d512_shared_kv, AttentionD512, FusedProjection};

use crate::attention_support::refusal;

/// Past every address space once rows of some bytes are counted, on a machine that promises memory that it does not have too.
const MANY: usize = 1 << 44;

fn one(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

/// `(batch, heads, rows, 512)` from one row.
fn rows(batch: usize, heads: usize, rows: usize) -> Tensor {
    let row = one(&[1, 1, 1, 512]);
    row.broadcast_as((batch, heads, rows, 512)).unwrap()
}

fn keys() -> Result<RotaryKeys> {
    let tables = RotaryTables::new(&[1.0], 8, &Device::Cpu)?;
    RotaryKeys::new(&one(&[512]), &tables)
}

#[test]
fn attention_over_more_rows_than_memory_holds_is_an_error() -> Result<()> {
    let (q, key) = (rows(MANY, 1, 1), rows(1, 1, 1));
    insta::assert_snapshot!(refusal(attention_d512(&q, &q, &q, 1.0)), @"attention_d512: no memory for the result of shape [17592186044416, 1, 1, 512], which would take 36028797018963968 bytes");
    insta::assert_snapshot!(refusal(attention_d512_shared_kv(&q, &q, &keys()?, 1.0)), @"attention_d512_shared_kv: no memory for the result of shape [17592186044416, 1, 1, 512], which would take 36028797018963968 bytes");
    let all = AttentionD512::new(1.0).causal(false);
    let long = rows(1, 1, MANY);
    insta::assert_snapshot!(refusal(all.forward(&long, &key, &key)), @"attention_d512: no memory for the result of shape [1, 1, 17592186044416, 512], which would take 36028797018963968 bytes");
    insta::assert_snapshot!(refusal(all.partials(&long, &key, &key)), @"attention_d512: no memory for 17592186044416 partial states, which would take 36169534507319296 bytes");
    insta::assert_snapshot!(refusal(all.partials_shared_kv(&long, &key, &keys()?)), @"attention_d512_shared_kv: no memory for 17592186044416 partial states, which would take 36169534507319296 bytes");
    Ok(())
}

#[test]
fn shapes_whose_products_wrap_are_refused_with_the_bytes() -> Result<()> {
    // 2^32 * 2^32 rows are 0 of them in 64 bits.
    let (half, key) = (1 << 32, rows(1, 1, 1));
    let q = rows(half, half, 1);
    let error = refusal(attention_d512(&q, &q, &q, 1.0));
    insta::assert_snapshot!(error, @"attention_d512: the f32 result for q of shape [4294967296, 4294967296, 1, 512] would take 37778931862957161709568 bytes, which passes the 64-bit address range");
    assert_eq!(refusal(AttentionD512::new(1.0).check(&q, &q, &q)), error);
    assert_eq!(refusal(AttentionD512::new(1.0).partials(&q, &q, &q)), error);
    insta::assert_snapshot!(refusal(attention_d512_shared_kv(&q, &q, &keys()?, 1.0)), @"attention_d512_shared_kv: the f32 result for q of shape [4294967296, 4294967296, 1, 512] would take 37778931862957161709568 bytes, which passes the 64-bit address range");
    let k = rows(1, half, half);
    insta::assert_snapshot!(refusal(attention_d512(&rows(1, half, 1), &k, &k, 1.0)), @"attention_d512: k and v of shape [1, 4294967296, 4294967296, 512] in f32 would take 75557863725914323419136 bytes, which passes the 64-bit address range");
    let plain = |q, k| refusal(attention(q, k, k, 1.0, Visible::All));
    insta::assert_snapshot!(plain(&q, &q), @"reference attention: q of shape [4294967296, 4294967296, 1, 512] would take 37778931862957161709568 bytes, which passes the 64-bit address range");
    insta::assert_snapshot!(plain(&key, &rows(1, 1, 1 << 63)), @"reference attention: k of shape [1, 1, 9223372036854775808, 512] would take 18889465931478580854784 bytes, which passes the 64-bit address range");
    Ok(())
}

#[test]
fn states_of_more_rows_than_memory_holds_are_an_error() -> Result<()> {
    let states = |partitions, rows| {
        let sums = one(&[1; 4]).broadcast_as((partitions, rows, 1, 1))?;
        let numerator = one(&[1; 5]).broadcast_as((partitions, rows, 1, 1, 512))?;
        AttentionPartials::new(sums.clone(), sums, numerator)
    };
    let many = states(1, MANY << 4)?;
    insta::assert_snapshot!(refusal(many.finish(DType::BF16)), @"attention_partials: no memory for a contiguous copy of states of shape [1, 281474976710656, 1, 1], which would take 1125899906842624 bytes");
    insta::assert_snapshot!(refusal(many.log_sum_exp()), @"attention_partials: no memory for a contiguous copy of states of shape [1, 281474976710656, 1, 1], which would take 1125899906842624 bytes");
    insta::assert_snapshot!(refusal(AttentionPartials::merge(&[many.clone(), many])), @"attention_partials: no memory for 2 states of each row of (281474976710656, 1, 1), which would take 1157425104234217472 bytes");
    insta::assert_snapshot!(refusal(states(1 << 32, 1 << 32)), @"attention_partials: states with a numerator of shape [4294967296, 4294967296, 1, 1, 512] would take 37926505815546838122496 bytes, which passes the 64-bit address range");
    Ok(())
}

#[test]
fn projections_of_more_rows_than_memory_holds_are_an_error() -> Result<()> {
    let projection = FusedProjection::pack(&[("a", &one(&[64, 32]))])?;
    let many = |n: usize| one(&[1, 32]).broadcast_as((n, 32));
    insta::assert_snapshot!(refusal(projection.forward(&many(MANY)?)), @"fused_projection: no memory for the result of 17592186044416 rows of 64, which would take 4503599627370496 bytes");
    insta::assert_snapshot!(refusal(projection.forward(&many(1 << 62)?)), @"fused_projection: xs of shape [4611686018427387904, 32] times 64 rows would take 1180591620717411303424 bytes, which passes the 64-bit address range");
    insta::assert_snapshot!(refusal(FusedProjection::pack(&[("a", &many(MANY)?)])), @r#"fused_projection: no memory for a copy of block "a" of shape [17592186044416, 32], which would take 2251799813685248 bytes"#);
    let half = many(1 << 63)?;
    insta::assert_snapshot!(refusal(FusedProjection::pack(&[("a", &half), ("b", &half)])), @r#"fused_projection: a copy of block "a" of shape [9223372036854775808, 32] would take 1180591620717411303424 bytes, which passes the 64-bit address range"#);
    Ok(())
}

#[test]
fn plain_attention_over_more_rows_than_memory_holds_is_an_error() {
    let (q, key) = (rows(MANY, 1, 1), rows(1, 1, 1));
    insta::assert_snapshot!(refusal(attention(&q, &q, &q, 1.0, Visible::All)), @"reference attention: no memory for q of shape [17592186044416, 1, 1, 512], which would take 36028797018963968 bytes");
    let long = rows(1, 1, MANY);
    insta::assert_snapshot!(refusal(attention(&key, &long, &long, 1.0, Visible::All)), @"reference attention: no memory for k of shape [1, 1, 17592186044416, 512], which would take 36028797018963968 bytes");
}

/// What is reserved is only asked for at the first append.
#[test]
fn a_cache_that_can_t_be_had_is_an_error_and_nothing_is_stored() -> Result<()> {
    let mut cache = LayerCache::new(LayerKind::Full);
    cache.reserve(usize::MAX);
    let token = rows(1, 1 << 14, 1);
    insta::assert_snapshot!(refusal(cache.append(&token, &token)), @"kv cache: no memory for 16777216 rows for [1, 16384, 1, 512] F32, which would take 1125899906842624 bytes");
    let mut values = LayerCache::values_only();
    values.reserve(usize::MAX);
    insta::assert_snapshot!(refusal(values.append_values(&token)), @"kv cache: no memory for 16777216 rows for [1, 16384, 1, 512] F32, which would take 562949953421312 bytes");
    assert_eq!((cache.len(), cache.bytes(), values.len()), (0, 0, 0));
    let small = rows(1, 1, 2);
    cache.reserve(2);
    cache.append(&small, &small)?;
    let many = rows(1, 1, MANY);
    insta::assert_snapshot!(refusal(cache.append(&many, &many)), @"kv cache: no memory for copies of keys or values of shape [1, 1, 17592186044416, 512], which would take 72057594037927936 bytes");
    let mut ring = LayerCache::new(LayerKind::Sliding { window: 4 });
    insta::assert_snapshot!(refusal(ring.append(&many, &many)), @"kv cache: no memory for copies of keys or values of shape [1, 1, 17592186044416, 512], which would take 72057594037927936 bytes");
    assert_eq!((cache.len(), ring.len()), (2, 0));
    Ok(())
}
