//! The header of a GGUF file, read so that no file, however made, costs more than its own size in time; in memory a
//! value of an array takes 32 bytes, of which there are at most [`MOST_ELEMENTS`].

use candle::{bail, Result};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Seek};

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// A vocabulary of Gemma 4 has 262,144 entries and twice as many merges; each costs 32 bytes here before its text.
const MOST_ELEMENTS: u64 = 1 << 22;
const LONGEST_STRING: u64 = 1 << 24;
const LONGEST_KEY: u64 = 1 << 16;
const MOST_DIMS: u32 = 4;
const DEEPEST: usize = 2;

/// A value of the metadata. The format's integer types are one here: writers differ in which they choose.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of any width and sign.
    Integer(i128),
    /// Of either width.
    Float(f64),
    /// A byte, 0 or 1.
    Bool(bool),
    /// UTF-8.
    Text(String),
    /// All of one type.
    Array(Vec<Value>),
}

#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    /// Outermost first, as candle has it; the file has it the other way round.
    pub(super) shape: Vec<usize>,
    /// The format's number of the type.
    pub(super) type_id: u32,
    /// From the beginning of the file.
    pub(super) start: u64,
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorEntry>,
    pub(super) file_len: u64,
}

/// Reads the header from the beginning of `reader`; errors say at which byte and of what.
pub(super) fn read<R: Read + Seek>(mut reader: R) -> Result<Header> {
    let file_len = reader.seek(std::io::SeekFrom::End(0))?;
    reader.rewind()?;
    let mut cursor = Cursor {
        reader,
        at: 0,
        file_len,
        elements: 0,
    };
    let magic: [u8; 4] = cursor.bytes("the magic")?;
    if magic != MAGIC {
        bail!("no GGUF file, it begins with {magic:?}, want {MAGIC:?}");
    }
    match cursor.u32("the version")? {
        2 | 3 => {}
        version if matches!(version.swap_bytes(), 1..=3) => {
            bail!("the file is big-endian, want a little-endian one")
        }
        version => bail!("version {version} of GGUF is not implemented, want 2 or 3"),
    }
    let tensor_count = cursor.u64("the number of tensors")?;
    let entry_count = cursor.u64("the number of metadata entries")?;
    // At its smallest an entry has an empty key, its type and a byte; a tensor a name, a rank, a type and an offset.
    cursor.check_room(entry_count, 13, "metadata entries")?;
    cursor.check_room(tensor_count, 24, "tensors")?;
    let mut metadata = BTreeMap::new();
    for i in 0..entry_count {
        let key = cursor.text(LONGEST_KEY, &format!("the key of metadata entry {i}"))?;
        let value_type = cursor.u32(&key)?;
        let value = cursor.value(value_type, 0, &key)?;
        if metadata.insert(key.clone(), value).is_some() {
            bail!("metadata key {key:?} is there twice");
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(Value::Integer(n)) if (1..=1 << 16).contains(n) && (*n as u64).is_power_of_two() => {
            *n as u64
        }
        Some(other) => bail!(
            "`general.alignment` is {}, want a power of two up to 65536",
            shown(other)
        ),
    };
    let mut listed = Vec::new();
    for i in 0..tensor_count {
        listed.push(cursor.tensor(i)?);
    }
    let data_start = cursor.at.div_ceil(alignment) * alignment;
    let mut tensors = BTreeMap::new();
    for (name, mut entry) in listed {
        if entry.start % alignment != 0 {
            bail!(
                "tensor {name:?}: its offset {} is no multiple of the alignment {alignment}",
                entry.start
            );
        }
        match data_start.checked_add(entry.start) {
            Some(start) if start <= file_len => entry.start = start,
            _ => bail!(
                "tensor {name:?}: its offset {} from byte {data_start} is past the end of the file at {file_len}",
                entry.start
            ),
        }
        if tensors.insert(name.clone(), entry).is_some() {
            bail!("tensor {name:?} is there twice");
        }
    }
    Ok(Header {
        metadata,
        tensors,
        file_len,
    })
}

struct Cursor<R> {
    reader: R,
    at: u64,
    file_len: u64,
    /// Of all arrays so far.
    elements: u64,
}

impl<R: Read> Cursor<R> {
    fn fill(&mut self, buffer: &mut [u8], what: &str) -> Result<()> {
        match self.reader.read_exact(buffer) {
            Ok(()) => {
                self.at += buffer.len() as u64;
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => bail!(
                "truncated at byte {} in {what}, {} bytes are wanted from byte {}",
                self.file_len,
                buffer.len(),
                self.at
            ),
            Err(e) => bail!("byte {}, {what}: {e}", self.at),
        }
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    /// Refuses a count whose items could not be in the rest of the file, before any of them is read.
    fn check_room(&self, count: u64, smallest: u64, what: &str) -> Result<()> {
        let left = self.file_len - self.at;
        if count.checked_mul(smallest).is_none_or(|bytes| bytes > left) {
            bail!(
                "byte {}: {count} {what} cannot be in the {left} bytes that follow",
                self.at
            );
        }
        Ok(())
    }

    fn text(&mut self, longest: u64, what: &str) -> Result<String> {
        let at = self.at;
        let len = self.u64(what)?;
        let left = self.file_len - self.at;
        if len > longest.min(left) {
            bail!("byte {at}, {what}: a string of {len} bytes, want at most {longest} of the {left} that follow");
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, what)?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(e) => bail!("byte {at}, {what}: no UTF-8: {e}"),
        }
    }

    fn value(&mut self, value_type: u32, depth: usize, key: &str) -> Result<Value> {
        let int = |n: i128| Ok(Value::Integer(n));
        match value_type {
            0 => int(u8::from_le_bytes(self.bytes(key)?).into()),
            1 => int(i8::from_le_bytes(self.bytes(key)?).into()),
            2 => int(u16::from_le_bytes(self.bytes(key)?).into()),
            3 => int(i16::from_le_bytes(self.bytes(key)?).into()),
            4 => int(u32::from_le_bytes(self.bytes(key)?).into()),
            5 => int(i32::from_le_bytes(self.bytes(key)?).into()),
            10 => int(u64::from_le_bytes(self.bytes(key)?).into()),
            11 => int(i64::from_le_bytes(self.bytes(key)?).into()),
            6 => Ok(Value::Float(f32::from_le_bytes(self.bytes(key)?).into())),
            12 => Ok(Value::Float(f64::from_le_bytes(self.bytes(key)?))),
            7 => match self.bytes(key)? {
                [0] => Ok(Value::Bool(false)),
                [1] => Ok(Value::Bool(true)),
                [other] => bail!(
                    "byte {}, {key}: a bool of {other}, want 0 or 1",
                    self.at - 1
                ),
            },
            8 => Ok(Value::Text(self.text(LONGEST_STRING, key)?)),
            9 => self.array(depth, key),
            other => bail!("byte {}, {key}: value type {other} is unknown", self.at),
        }
    }

    fn array(&mut self, depth: usize, key: &str) -> Result<Value> {
        if depth == DEEPEST {
            bail!(
                "byte {}, {key}: arrays are nested more than {DEEPEST} deep",
                self.at
            );
        }
        let element_type = self.u32(key)?;
        let len = self.u64(key)?;
        let smallest = match element_type {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            other => bail!("byte {}, {key}: value type {other} is unknown", self.at),
        };
        self.check_room(len, smallest, &format!("elements of {key}"))?;
        self.elements += len;
        if self.elements > MOST_ELEMENTS {
            bail!(
                "byte {}, {key}: arrays have {} elements so far, want at most {MOST_ELEMENTS}",
                self.at,
                self.elements
            );
        }
        let elements = (0..len).map(|_| self.value(element_type, depth + 1, key));
        Ok(Value::Array(elements.collect::<Result<_>>()?))
    }

    /// With the offset as the file has it, from the beginning of the data.
    fn tensor(&mut self, i: u64) -> Result<(String, TensorEntry)> {
        let name = self.text(LONGEST_KEY, &format!("the name of tensor {i}"))?;
        let rank = self.u32(&name)?;
        if rank == 0 || rank > MOST_DIMS {
            bail!("tensor {name:?}: has {rank} dimensions, want 1 to {MOST_DIMS}");
        }
        let dims: Vec<u64> = (0..rank).map(|_| self.u64(&name)).collect::<Result<_>>()?;
        let elements = dims
            .iter()
            .try_fold(1u64, |product, dim| product.checked_mul(*dim));
        // No type takes more than 8 bytes an element.
        if elements.is_none_or(|n| n == 0 || n > i64::MAX as u64 / 8) {
            bail!("tensor {name:?}: has dimensions {dims:?}, want a product that is neither 0 nor beyond 64-bit addresses");
        }
        let shape = dims.iter().rev().map(|dim| *dim as usize).collect();
        let type_id = self.u32(&name)?;
        let start = self.u64(&name)?;
        let entry = TensorEntry {
            shape,
            type_id,
            start,
        };
        Ok((name, entry))
    }
}

/// A value as an error shows it: short, whatever the file holds.
pub(super) fn shown(value: &Value) -> String {
    let text = match value {
        Value::Integer(n) => n.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Text(text) => format!("{:?}", text.chars().take(60).collect::<String>()),
        Value::Array(values) => {
            let first: Vec<_> = values.iter().take(8).map(shown).collect();
            let more = if values.len() > 8 { ", ..." } else { "" };
            format!("[{}{more}]", first.join(", "))
        }
    };
    text.chars().take(120).collect()
}
