//! A checkpoint to a GGUF file, tensor by tensor.

use super::replace::Replacement;
use super::write::{self, Meta};
use super::{bounded_file, metadata, read_tokenizer, template_file, vocabulary};
use anyhow::{bail, Context, Result};
use candle::quantized::{GgmlDType, QTensor};
use candle::{DType, Device};
use gem::models::gemma4::{Config, Gguf, StopTokens, Weights};
use rayon::prelude::*;
use std::io::Write;
use std::path::Path;

/// Elements that one thread quantizes at a time.
const CHUNK: usize = 1 << 20;
/// Elements of the largest blocks, those of K-quants.
const LARGEST_BLOCK: usize = 256;
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";

/// What is to be written, with all of it checked and nothing of it done.
pub struct Plan {
    weights: Weights,
    pub metadata: Vec<(String, Meta)>,
    /// Names in the checkpoint; none for the divisors.
    sources: Vec<Option<String>>,
    pub tensors: Vec<write::Tensor>,
    pub rope_freqs: Vec<f32>,
    /// What the reader of the file will miss.
    pub notes: Vec<String>,
}

impl Plan {
    /// `folder` holds config.json, tokenizer.json and the weights; also generation_config.json, chat_template.jinja and
    /// tokenizer_config.json if they are there.
    pub fn new(folder: &Path, wanted: GgmlDType) -> Result<Self> {
        let config = Config::from_file(folder.join("config.json"))?;
        let weights = Weights::open_dir(folder)?;
        let shapes = config.tensor_shapes();
        weights.check(&shapes)?;
        let name = folder.canonicalize()?;
        let name = name
            .file_name()
            .map_or("gemma4".into(), |name| name.to_string_lossy());
        let mut metadata = metadata::of_model(&config, &name, file_type(wanted))?;
        let mut notes = Vec::new();
        let read = |name, largest| bounded_file::read(&folder.join(name), largest);
        match read(TOKENIZER, bounded_file::LARGEST)? {
            Some(text) => {
                // What the program would refuse to run is not worth writing.
                read_tokenizer(text.as_bytes()).context(TOKENIZER)?;
                let generation = read(GENERATION, bounded_file::LARGEST_SETTINGS)?;
                let stop = StopTokens::new(&config, generation.as_deref()).context(GENERATION)?;
                let (tokenizer, more) =
                    vocabulary::of_tokenizer(&text, &config, &stop).context(TOKENIZER)?;
                metadata.extend(tokenizer);
                notes.extend(more);
            }
            None => {
                notes.push("the folder has no tokenizer.json, so the file has no tokenizer".into())
            }
        }
        if let Some((template, _)) = template_file::of_checkpoint(folder)? {
            metadata.push(("tokenizer.chat_template".into(), Meta::Text(template)));
        }
        let rope_freqs = metadata::rope_freqs(&config)?;
        let mut tensors = vec![write::Tensor {
            name: "rope_freqs.weight".into(),
            shape: vec![rope_freqs.len()],
            dtype: GgmlDType::F32,
        }];
        let mut sources = vec![None];
        for (source, shape) in shapes {
            let Some(name) = Gguf::tensor_name(&source) else {
                bail!("{source} has no name in GGUF files");
            };
            let dtype = choose(&shape, wanted);
            if dtype != wanted && shape.len() > 1 {
                notes.push(format!(
                    "{name} is {}: rows of {} are no multiple of {}",
                    write::kind(dtype).0,
                    shape[1],
                    wanted.block_size()
                ));
            }
            tensors.push(write::Tensor { name, shape, dtype });
            sources.push(Some(source));
        }
        Ok(Self {
            weights,
            metadata,
            sources,
            tensors,
            rope_freqs,
            notes,
        })
    }

    /// Writes the file; `done` is told the bytes of each tensor.
    pub fn write(self, mut out: Replacement, mut done: impl FnMut(usize)) -> Result<()> {
        out.write_all(&write::header(&self.metadata, &self.tensors))?;
        let weights = self.weights.var_builder(DType::F32, &Device::Cpu);
        for (tensor, source) in self.tensors.iter().zip(&self.sources) {
            let bytes = match source {
                None => self
                    .rope_freqs
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect(),
                Some(source) => {
                    let values = weights.get(tensor.shape.as_slice(), source)?;
                    let values = values.flatten_all()?.to_vec1::<f32>()?;
                    encode(&values, tensor.dtype).with_context(|| source.clone())?
                }
            };
            anyhow::ensure!(
                bytes.len() == tensor.bytes(),
                "{}: has {} bytes, want {}",
                tensor.name,
                bytes.len(),
                tensor.bytes()
            );
            write::data(&mut out, &bytes)?;
            done(bytes.len());
        }
        out.put()
    }
}

/// The values as blocks of a type, which rows fill.
pub fn encode(values: &[f32], dtype: GgmlDType) -> Result<Vec<u8>> {
    if let Some(at) = values.par_iter().position_any(|x| !x.is_finite()) {
        bail!("element {at} is {}, want finite values", values[at]);
    }
    let chunks = values.par_chunks(CHUNK).map(|chunk| {
        let quantized = QTensor::quantize(&candle::Tensor::new(chunk, &Device::Cpu)?, dtype)?;
        let back = quantized.dequantize(&Device::Cpu)?.to_vec1::<f32>()?;
        for (block, back) in chunk.chunks(LARGEST_BLOCK).zip(back.chunks(LARGEST_BLOCK)) {
            let largest = block.iter().zip(back);
            let largest = largest.max_by(|(a, _), (b, _)| a.abs().total_cmp(&b.abs()));
            if let Some((x, y)) = largest.filter(|(&x, &y)| !holds(x, y)) {
                let kind = write::kind(dtype).0;
                bail!("{x} is too large for {kind}: it would become {y}");
            }
        }
        Ok(quantized.data()?.into_owned())
    });
    Ok(chunks.collect::<Result<Vec<_>>>()?.concat())
}

/// Whether the largest value of a block may become `back` in it. Where a scale passes the range of its type, f16, a whole block
/// becomes infinite or 0.
fn holds(largest: f32, back: f32) -> bool {
    largest.abs() <= 1. || (largest - back).abs() < largest.abs() / 2.
}

/// Norms and scalars are F32; a matrix falls back where its rows are no whole number of blocks.
fn choose(shape: &[usize], wanted: GgmlDType) -> GgmlDType {
    let [_, columns] = shape else {
        return GgmlDType::F32;
    };
    let fits = |dtype: &GgmlDType| columns % dtype.block_size() == 0;
    let choices = [wanted, GgmlDType::Q8_0];
    choices.into_iter().find(fits).unwrap_or(GgmlDType::BF16)
}

/// llama.cpp's number for files that are mostly of this type.
fn file_type(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4K => 14,
        GgmlDType::Q5K => 16,
        GgmlDType::Q6K => 18,
        GgmlDType::BF16 => 32,
        // Q8_0, the last that can be asked for.
        _ => 7,
    }
}
