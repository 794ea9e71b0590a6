//! A checkpoint's tokenizer, which must neither cut nor fill up what it is given.

use crate::guard::guarded;
use anyhow::{anyhow, bail, Result};
use tokenizers::{ModelWrapper, Tokenizer};

/// Reads the bytes of a `tokenizer.json`.
///
/// # Errors
///
/// What the tokenizers crate refuses or panics at; a model other than Gemma's BPE; truncation or padding, which would change a
/// prompt without a word.
pub fn read_tokenizer(json: &[u8]) -> Result<Tokenizer> {
    let tokenizer = guarded(|| Tokenizer::from_bytes(json).map_err(|e| anyhow!("{e}")))?;
    if !matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) {
        bail!("the tokenizer's model is of another type, want BPE");
    }
    if tokenizer.get_truncation().is_some() {
        bail!("the tokenizer has `truncation`, want null");
    }
    if tokenizer.get_padding().is_some() {
        bail!("the tokenizer has `padding`, want null");
    }
    Ok(tokenizer)
}
