//! Tokens to text as they come; nothing of the text is lost to a character that never gets complete.

use candle::{Error, Result};
use std::io::Write;
use tokenizers::{
    DecodeStream, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Tokenizer,
};

type Decoder<'a> = DecodeStream<
    'a,
    ModelWrapper,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

pub struct TextStream<'a, W> {
    tokenizer: &'a Tokenizer,
    decoder: Decoder<'a>,
    out: W,
    ids: Vec<u32>,
    /// What was printed: all but an incomplete character at the end.
    text: String,
}

impl<'a, W: Write> TextStream<'a, W> {
    pub fn new(tokenizer: &'a Tokenizer, out: W) -> Self {
        Self {
            tokenizer,
            decoder: tokenizer.decode_stream(true),
            out,
            ids: vec![],
            text: String::new(),
        }
    }

    pub fn push(&mut self, id: u32) -> Result<()> {
        self.ids.push(id);
        match self.decoder.step(id).map_err(failed)? {
            Some(text) => self.print(&text),
            None => Ok(()),
        }
    }

    /// Prints what is left and returns the whole text.
    pub fn finish(mut self) -> Result<String> {
        let whole = self.tokenizer.decode(&self.ids, true).map_err(failed)?;
        if let Some(rest) = whole.strip_prefix(self.text.as_str()) {
            self.print(rest)?;
        }
        writeln!(self.out)?;
        Ok(self.text)
    }

    fn print(&mut self, text: &str) -> Result<()> {
        write!(self.out, "{text}")?;
        self.out.flush()?;
        self.text += text;
        Ok(())
    }
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Msg(format!("tokenizer: {error}"))
}
