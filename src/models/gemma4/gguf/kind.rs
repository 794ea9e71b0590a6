//! The types of GGUF tensors, by the numbers that files have for them.

use candle::quantized::GgmlDType;

/// What candle can multiply by. Q8_1 and Q8_K are types of activations, which no file of weights holds.
const KNOWN: [(u32, GgmlDType, &str); 13] = [
    (0, GgmlDType::F32, "F32"),
    (1, GgmlDType::F16, "F16"),
    (2, GgmlDType::Q4_0, "Q4_0"),
    (3, GgmlDType::Q4_1, "Q4_1"),
    (6, GgmlDType::Q5_0, "Q5_0"),
    (7, GgmlDType::Q5_1, "Q5_1"),
    (8, GgmlDType::Q8_0, "Q8_0"),
    (10, GgmlDType::Q2K, "Q2_K"),
    (11, GgmlDType::Q3K, "Q3_K"),
    (12, GgmlDType::Q4K, "Q4_K"),
    (13, GgmlDType::Q5K, "Q5_K"),
    (14, GgmlDType::Q6K, "Q6_K"),
    (30, GgmlDType::BF16, "BF16"),
];

const UNKNOWN: [(u32, &str); 22] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// The type of this number, or how it is called if there is no code for it.
pub(super) fn known(type_id: u32) -> Result<GgmlDType, String> {
    if let Some((_, dtype, _)) = KNOWN.iter().find(|(id, _, _)| *id == type_id) {
        return Ok(*dtype);
    }
    Err(match UNKNOWN.iter().find(|(id, _)| *id == type_id) {
        Some((_, name)) => name.to_string(),
        None => format!("type {type_id}"),
    })
}

/// As the format calls it.
pub(super) fn name(dtype: GgmlDType) -> &'static str {
    match KNOWN.iter().find(|(_, known, _)| *known == dtype) {
        Some((_, _, name)) => name,
        None => "an unknown type",
    }
}

/// Whether each element stands for itself.
pub(super) fn is_plain(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}
