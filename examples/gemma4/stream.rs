//! Tokens to text as they come; nothing of the text is lost to a character that never gets complete.

use candle::{Error, Result};
use std::io::{Stderr, Write};
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

/// An answer as it comes, without the thoughts before it.
pub struct AnswerStream<'a, W> {
    tokenizer: &'a Tokenizer,
    answer: TextStream<'a, W>,
    /// The tokens that open and close thoughts, if the tokenizer has them.
    channel: Option<(u32, u32)>,
    thinking: bool,
    thought: Option<TextStream<'a, Stderr>>,
    show_thoughts: bool,
}

impl<'a, W: Write> AnswerStream<'a, W> {
    pub fn new(tokenizer: &'a Tokenizer, out: W, show_thoughts: bool) -> Self {
        let id = |token| tokenizer.token_to_id(token);
        Self {
            tokenizer,
            answer: TextStream::new(tokenizer, out),
            channel: id("<|channel>").zip(id("<channel|>")),
            thinking: false,
            thought: None,
            show_thoughts,
        }
    }

    pub fn push(&mut self, id: u32) -> Result<()> {
        match self.channel {
            Some((open, _)) if id == open => {
                self.thinking = true;
                self.end_thought()?;
                if self.show_thoughts {
                    self.thought = Some(TextStream::new(self.tokenizer, std::io::stderr()));
                }
                Ok(())
            }
            Some((_, close)) if id == close => {
                self.thinking = false;
                self.end_thought()
            }
            _ => match &mut self.thought {
                Some(thought) => thought.push(id),
                None if self.thinking => Ok(()),
                None => self.answer.push(id),
            },
        }
    }

    /// Prints what is left and returns the whole answer.
    pub fn finish(mut self) -> Result<String> {
        self.end_thought()?;
        self.answer.finish()
    }

    fn end_thought(&mut self) -> Result<()> {
        match self.thought.take() {
            Some(thought) => thought.finish().map(drop),
            None => Ok(()),
        }
    }
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Msg(format!("tokenizer: {error}"))
}
