//! A GGUF file of Gemma 4, as llama.cpp writes it: checked as a whole before a weight is read.

mod config;
mod header;
mod kind;
mod names;
mod tokenizer;

pub use header::Value;

use super::file;
use super::matrix::Matrix;
use super::source::Source;
use super::Config;
use candle::quantized::{GgmlDType, QStorage, QTensor};
use candle::{bail, DType, Device, Result, Tensor};
use config::Keys;
use header::{Header, TensorEntry};
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const INSTEAD: &str = "want Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BF16, F16 or F32 (files called Q4_0, Q4_K_M, Q5_K_M, Q6_K or Q8_0 have them)";

/// An opened GGUF file of a Gemma 4 text decoder, of which only the header was read.
///
/// [`Model::from_gguf`](super::Model::from_gguf) loads it. Tensors go by the names of llama.cpp (`blk.0.attn_q.weight`).
/// Matrices stay in memory in the type that they have in the file, except that F32, F16 and BF16 become the type of the
/// model. The file must not be changed while it is open.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    file: Mutex<File>,
    header: Header,
    config: Config,
}

impl Gguf {
    /// Whether the file at `path` begins as GGUF files do; false if it can't be read.
    pub fn is_gguf(path: impl AsRef<Path>) -> bool {
        let path = path.as_ref();
        let mut magic = [0; 4];
        file::fault(path, u64::MAX).is_none()
            && File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok())
            && &magic == b"GGUF"
    }

    /// Reads the header.
    ///
    /// # Errors
    ///
    /// Names the file, and the byte, key or tensor at fault, what it got and what it wants: a file that is no GGUF, is cut
    /// short or lies about its sizes; one part of several; a model that is no Gemma 4, or one with what the graph does
    /// not compute (per-layer inputs, shared KV layers, experts, other frequency divisors than the proportional rule's).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let open = || -> Result<Self> {
            if let Some(fault) = file::fault(path, u64::MAX) {
                bail!("{fault}");
            }
            let file = File::open(path)?;
            let header = header::read(BufReader::new(&file))?;
            let entry = config::rope_freqs(&header)?;
            let bytes = read_bytes(&file, entry, 4 * entry.shape[0])?;
            let values = bytes.chunks_exact(4);
            let divisors: Vec<f32> = values
                .map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]))
                .collect();
            let config = config::resolve(&header, &divisors)?;
            Ok(Self {
                path: path.to_path_buf(),
                file: Mutex::new(file),
                header,
                config,
            })
        };
        open().map_err(|e| placed(path.display(), e))
    }

    /// The name in a GGUF file of a tensor of [`Config::tensor_shapes`].
    pub fn tensor_name(name: &str) -> Option<String> {
        names::in_gguf(name)
    }

    /// What the metadata and the list of tensors say of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A value of the metadata.
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(key)
    }

    /// The template of chats, in Jinja, if the file has one.
    pub fn chat_template(&self) -> Option<&str> {
        match self.metadata("tokenizer.chat_template") {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The tokenizer as the text of a `tokenizer.json`, for `Tokenizer::from_bytes` of the tokenizers crate.
    ///
    /// # Errors
    ///
    /// The file has no tokenizer, or not one of model `gemma4` with tokens, types and merges that fit each other.
    pub fn tokenizer_json(&self) -> Result<String> {
        let json = tokenizer::json(Keys(&self.header), self.config.bos_token_id);
        json.map_err(|e| placed(self.path.display(), e))
    }

    /// Bytes of tensors by the name of their type, and how many there are, in the order of names.
    ///
    /// # Errors
    ///
    /// A type that there is no code for.
    pub fn types(&self) -> Result<Vec<(&'static str, usize, usize)>> {
        let mut types = std::collections::BTreeMap::new();
        for (name, entry) in &self.header.tensors {
            match self.bytes_of(name, entry) {
                Ok((dtype, bytes)) => {
                    let (count, sum) = types.entry(kind::name(dtype)).or_insert((0, 0));
                    (*count, *sum) = (*count + 1, *sum + bytes);
                }
                Err(fault) => bail!("gguf: {}: {fault}", self.path.display()),
            }
        }
        let rows = types.into_iter();
        Ok(rows.map(|(name, (n, bytes))| (name, n, bytes)).collect())
    }

    /// Bytes of the weights once they are loaded for a model of type `dtype`; 0 for a tensor that [`check`](Self::check)
    /// refuses.
    pub fn planned_bytes(&self, dtype: DType) -> usize {
        let tensors = self.header.tensors.iter();
        let bytes = tensors.map(|(name, entry)| match self.bytes_of(name, entry) {
            Ok((stored, _)) if kind::is_plain(stored) => {
                let held = if entry.shape.len() == 1 {
                    DType::F32
                } else {
                    dtype
                };
                entry.shape.iter().product::<usize>() * held.size_in_bytes()
            }
            Ok((_, bytes)) => bytes,
            Err(_) => 0,
        });
        bytes.sum()
    }

    /// Compares every tensor with the model before any of them is loaded.
    ///
    /// # Errors
    ///
    /// One error for all that is wrong (the first eight in words): tensors that are missing, not of this model, of another
    /// shape, past the end of the file or inside of another; a type that there is no code for, with what to use instead; a quantized norm.
    pub fn check(&self) -> Result<()> {
        let mut faults = Vec::new();
        let mut expected = std::collections::BTreeSet::from([names::ROPE_FREQS.to_string()]);
        for (ours, shape) in self.config.tensor_shapes() {
            let Some(name) = names::in_gguf(&ours) else {
                bail!("gguf: {ours} has no name in GGUF files");
            };
            match self.header.tensors.get(&name) {
                None => faults.push(format!("{name}: missing")),
                Some(entry) if entry.shape != shape => faults.push(format!(
                    "{name}: has shape {:?}, want {shape:?}",
                    entry.shape
                )),
                Some(entry) => match self.bytes_of(&name, entry) {
                    Ok((dtype, _)) if shape.len() == 1 && !kind::is_plain(dtype) => faults.push(
                        format!("{name}: is {}, want F32, F16 or BF16", kind::name(dtype)),
                    ),
                    Ok(_) => {}
                    Err(fault) => faults.push(fault),
                },
            }
            expected.insert(name);
        }
        faults.extend(self.overlaps());
        let strays = self.header.tensors.keys();
        let strays = strays.filter(|name| !expected.contains(*name));
        faults.extend(strays.map(|name| format!("{name}: not a tensor of this model")));
        super::weights::refuse(
            "gguf",
            faults
                .into_iter()
                .map(|fault| format!("{}: {fault}", self.path.display()))
                .collect(),
        )
    }

    /// Tensors that begin inside of another: one of the two has the other's numbers.
    fn overlaps(&self) -> Vec<String> {
        let tensors = self.header.tensors.iter();
        let mut places: Vec<_> = tensors
            .filter_map(|(name, entry)| {
                let (_, bytes) = self.bytes_of(name, entry).ok()?;
                Some((entry.start, entry.start + bytes as u64, name))
            })
            .collect();
        places.sort_unstable();
        let mut faults = Vec::new();
        let (mut last_end, mut last) = (0, None);
        for (start, end, name) in places {
            match last {
                Some(last) if start < last_end => faults.push(format!(
                    "{name}: starts at byte {start}, inside of {last}, which ends at byte {last_end}"
                )),
                _ => {}
            }
            if end > last_end {
                (last_end, last) = (end, Some(name));
            }
        }
        faults
    }

    /// The type of a tensor and its bytes, which are in the file.
    fn bytes_of(
        &self,
        name: &str,
        entry: &TensorEntry,
    ) -> std::result::Result<(GgmlDType, usize), String> {
        let dtype =
            kind::known(entry.type_id).map_err(|kind| format!("{name}: is {kind}, {INSTEAD}"))?;
        let row = entry.shape.last().copied().unwrap_or(1);
        if row % dtype.block_size() != 0 {
            return Err(format!(
                "{name}: has shape {:?}, want rows of a multiple of {} for {}",
                entry.shape,
                dtype.block_size(),
                kind::name(dtype)
            ));
        }
        let elements: usize = entry.shape.iter().product();
        let bytes = elements / dtype.block_size() * dtype.type_size();
        let left = self.header.file_len - entry.start;
        if bytes as u64 > left {
            return Err(format!(
                "{name}: has {bytes} bytes from byte {}, the file ends after {left} of them",
                entry.start
            ));
        }
        Ok((dtype, bytes))
    }

    fn read(&self, ours: &str, shape: &[usize], device: &Device) -> Result<QTensor> {
        let Some(name) = names::in_gguf(ours) else {
            bail!("{ours} has no name in GGUF files");
        };
        let Some(entry) = self.header.tensors.get(&name) else {
            bail!("{name}: missing");
        };
        if entry.shape != shape {
            bail!("{name}: has shape {:?}, want {shape:?}", entry.shape);
        }
        let (dtype, bytes) = match self.bytes_of(&name, entry) {
            Ok(found) => found,
            Err(fault) => bail!("{fault}"),
        };
        let Ok(file) = self.file.lock() else {
            bail!("{name}: another thread failed while it read the file");
        };
        // A vector of words, since candle wants the alignment of its blocks.
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: every bit pattern is a u64 and a u8.
        let (_, buffer, _) = unsafe { words.align_to_mut::<u8>() };
        let buffer = &mut buffer[..bytes];
        let mut read = || -> std::io::Result<()> {
            (&*file).seek(SeekFrom::Start(entry.start))?;
            (&*file).read_exact(buffer)
        };
        if let Err(e) = read() {
            bail!("{name}: {e}");
        }
        QTensor::new(
            QStorage::from_data(Cow::Borrowed(buffer), device, dtype)?,
            shape,
        )
        .map_err(|e| e.context(name.to_string()))
    }
}

fn read_bytes(mut file: &File, entry: &TensorEntry, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.seek(SeekFrom::Start(entry.start))?;
    match file.read_exact(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(e) => bail!("tensor {}: {e}", names::ROPE_FREQS),
    }
}

/// `e` with the file before it. candle's backtrace would stand in the middle of the text.
fn placed(path: std::path::Display, e: candle::Error) -> candle::Error {
    match e {
        candle::Error::WithBacktrace { inner, .. } => placed(path, *inner),
        e => candle::Error::Msg(format!("gguf: {path}: {e}")).bt(),
    }
}

/// A file on its way into a model.
pub(super) struct GgufSource<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
}

impl GgufSource<'_> {
    fn place(&self, e: candle::Error) -> candle::Error {
        placed(self.gguf.path.display(), e)
    }

    /// A tensor whose elements stand for themselves, as `dtype`.
    fn plain(&self, name: &str, tensor: &QTensor, dtype: DType) -> Result<Tensor> {
        // Without the detour over f32 that `dequantize` takes, which would be the largest allocation of all.
        let stored = match tensor.dtype() {
            GgmlDType::BF16 => DType::BF16,
            GgmlDType::F16 => DType::F16,
            _ => DType::F32,
        };
        let raw =
            Tensor::from_raw_buffer(&tensor.data()?, stored, tensor.shape().dims(), self.device)?;
        let values = raw.to_dtype(dtype)?;
        // BF16 and F32 reach far beyond F16, whose infinities would only show as NaN logits.
        if dtype == DType::F16 && stored != DType::F16 {
            let largest = values.abs()?.max_all()?.to_dtype(DType::F32)?;
            if largest.to_scalar::<f32>()?.is_infinite() {
                bail!("{name}: holds a value too large for F16, use BF16 or F32");
            }
        }
        Ok(values)
    }
}

impl Source for GgufSource<'_> {
    fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
        let load = || -> Result<Matrix> {
            let shape = [rows, columns];
            // Plain tensors are read on the CPU, since candle keeps a copy of what it loads elsewhere.
            let plain = names::in_gguf(name)
                .and_then(|name| self.gguf.header.tensors.get(&name))
                .and_then(|entry| kind::known(entry.type_id).ok())
                .is_some_and(kind::is_plain);
            match plain {
                true => {
                    let stored = self.gguf.read(name, &shape, &Device::Cpu)?;
                    Ok(Matrix::Dense(self.plain(name, &stored, self.dtype)?))
                }
                false => Ok(Matrix::quantized(self.gguf.read(
                    name,
                    &shape,
                    self.device,
                )?)),
            }
        };
        load().map_err(|e| self.place(e))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let load = || {
            let stored = self.gguf.read(name, &[len], &Device::Cpu)?;
            self.plain(name, &stored, DType::F32)
        };
        load().map_err(|e| self.place(e))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Device {
        self.device
    }
}
