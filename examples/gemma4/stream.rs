//! Tokens to text as they come; nothing of the text is lost to a character that never gets complete.

use candle::{Error, Result};
use std::io::Write;
use tokenizers::Tokenizer;

pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    print: bool,
    ids: Vec<u32>,
    /// What was printed: the text of all tokens but for an incomplete character at its end.
    text: String,
}

impl<'a> TextStream<'a> {
    pub fn new(tokenizer: &'a Tokenizer, print: bool) -> Self {
        Self {
            tokenizer,
            print,
            ids: vec![],
            text: String::new(),
        }
    }

    pub fn push(&mut self, id: u32) -> Result<()> {
        self.ids.push(id);
        let text = self.decoded()?;
        match text.strip_suffix(char::REPLACEMENT_CHARACTER) {
            Some(_) => Ok(()),
            None => self.print_up_to(text),
        }
    }

    /// Prints what is left and returns the whole text.
    pub fn finish(mut self) -> Result<String> {
        let text = self.decoded()?;
        self.print_up_to(text)?;
        if self.print {
            println!();
        }
        Ok(self.text)
    }

    fn decoded(&self) -> Result<String> {
        self.tokenizer
            .decode(&self.ids, true)
            .map_err(|e| Error::Msg(format!("tokenizer: {e}")))
    }

    fn print_up_to(&mut self, text: String) -> Result<()> {
        if self.print {
            print!(
                "{}",
                text.strip_prefix(self.text.as_str()).unwrap_or_default()
            );
            std::io::stdout().flush()?;
        }
        self.text = text;
        Ok(())
    }
}
