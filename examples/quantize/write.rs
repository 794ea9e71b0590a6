//! The bytes of a GGUF file: header first, then every tensor at its place.

use candle::quantized::GgmlDType;
use std::io::{self, Write};

/// The format's default.
const ALIGNMENT: usize = 32;

#[derive(Debug, Clone)]
#[allow(
    dead_code,
    reason = "other writers choose other integers, which the tests write too"
)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
    U64s(Vec<u64>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
}

pub struct Tensor {
    pub name: String,
    /// Outermost first; the file has it the other way round.
    pub shape: Vec<usize>,
    pub dtype: GgmlDType,
}

impl Tensor {
    pub fn bytes(&self) -> usize {
        let elements: usize = self.shape.iter().product();
        elements / self.dtype.block_size() * self.dtype.type_size()
    }
}

/// The name and number of a type in the format.
pub fn kind(dtype: GgmlDType) -> (&'static str, u32) {
    match dtype {
        GgmlDType::F32 => ("F32", 0),
        GgmlDType::F16 => ("F16", 1),
        GgmlDType::Q4_0 => ("Q4_0", 2),
        GgmlDType::Q4_1 => ("Q4_1", 3),
        GgmlDType::Q5_0 => ("Q5_0", 6),
        GgmlDType::Q5_1 => ("Q5_1", 7),
        GgmlDType::Q8_0 => ("Q8_0", 8),
        GgmlDType::Q8_1 => ("Q8_1", 9),
        GgmlDType::Q2K => ("Q2_K", 10),
        GgmlDType::Q3K => ("Q3_K", 11),
        GgmlDType::Q4K => ("Q4_K", 12),
        GgmlDType::Q5K => ("Q5_K", 13),
        GgmlDType::Q6K => ("Q6_K", 14),
        GgmlDType::Q8K => ("Q8_K", 15),
        GgmlDType::BF16 => ("BF16", 30),
    }
}

/// Everything before the data, which begins at the end of it.
pub fn header(metadata: &[(String, Meta)], tensors: &[Tensor]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut out, key);
        put(&mut out, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            out.extend((*dim as u64).to_le_bytes());
        }
        out.extend(kind(tensor.dtype).1.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

/// The data of the next tensor, filled up to where the one after it begins.
pub fn data(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    let padding = bytes.len().next_multiple_of(ALIGNMENT) - bytes.len();
    out.write_all(&[0; ALIGNMENT][..padding])
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &Meta) {
    let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Meta::U32(n) => out.extend([4u32.to_le_bytes(), n.to_le_bytes()].concat()),
        Meta::F32(x) => out.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
        Meta::Bool(b) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*b));
        }
        Meta::Text(string) => {
            out.extend(8u32.to_le_bytes());
            text(out, string);
        }
        Meta::I32s(values) => {
            array(out, 5, values.len());
            values.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::U32s(values) => {
            array(out, 4, values.len());
            values.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::U64s(values) => {
            array(out, 10, values.len());
            values.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::F32s(values) => {
            array(out, 6, values.len());
            values.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        Meta::Bools(values) => {
            array(out, 7, values.len());
            values.iter().for_each(|b| out.push(u8::from(*b)));
        }
        Meta::Texts(values) => {
            array(out, 8, values.len());
            values.iter().for_each(|string| text(out, string));
        }
    }
}
