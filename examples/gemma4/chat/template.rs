//! Chat templates: the checkpoint's own, or the built-in form of Gemma 4.
//!
//! A template comes with a checkpoint, so it is not trusted: it runs with bounded steps, nesting, memory, time and output, and sees
//! marks in place of what was said. The marks are what lets contents be told from the template's own control tokens afterwards.

use super::clock::strftime_now;
use super::conversation::{Conversation, Role};
use super::encoder::Piece;
use super::{meter, template_file};
use anyhow::{anyhow, bail, Context, Result};
use minijinja::{context, Environment, Error, ErrorKind};
use std::cell::OnceCell;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

const BUILT_IN: &str = include_str!("built_in.jinja");
/// Steps of a rendering; a conversation of 1,000 turns takes some 20,000 in the built-in form.
const STEPS: u64 = 2_000_000;
const NESTING: usize = 100;
/// Bytes that a rendering may hold at a time.
const MEMORY: usize = 64 << 20;
const TIME: Duration = Duration::from_secs(20);
/// Bytes that a template may write around the contents.
const LARGEST_OUTPUT: usize = 4 << 20;
/// A mark is an index between these two; both are private to applications in Unicode.
const MARK: (char, char) = ('\u{f8fe}', '\u{f8ff}');

#[derive(Debug)]
pub struct Template {
    source: String,
    origin: String,
    /// The bound that it broke, which is not tried again.
    broken: OnceCell<String>,
}

impl Template {
    /// The form of Gemma 4's own templates, without tools.
    pub fn built_in() -> Self {
        Self {
            source: BUILT_IN.into(),
            origin: "built-in".into(),
            broken: OnceCell::new(),
        }
    }

    pub fn new(source: String, origin: String) -> Result<Self> {
        if source.contains([MARK.0, MARK.1]) {
            bail!("{origin}: the template has U+F8FE or U+F8FF, which mark contents here");
        }
        let template = Self {
            source,
            origin,
            broken: OnceCell::new(),
        };
        template.bounded(|_| Ok(()))?;
        Ok(template)
    }

    pub fn from_file(path: &Path) -> Result<Self> {
        let text = template_file::read(path)?;
        let text = text.ok_or_else(|| anyhow!("{}: there is no such file", path.display()))?;
        Self::new(text, path.display().to_string())
    }

    /// `chat_template.jinja` of a checkpoint, or `chat_template` in its `tokenizer_config.json`.
    pub fn of_checkpoint(folder: &Path) -> Result<Option<Self>> {
        match template_file::of_checkpoint(folder)? {
            Some((source, origin)) => Self::new(source, origin).map(Some),
            None => Ok(None),
        }
    }

    /// The prompt for the model's next turn. `bos` is the text of that token.
    ///
    /// # Errors
    ///
    /// What the template raises or can't do, a bound that it breaks, a content that it leaves out or changes.
    pub fn render(&self, conversation: &Conversation, bos: Option<&str>) -> Result<Vec<Piece>> {
        let mut contents = Vec::new();
        let mut messages = Vec::new();
        let system = conversation.system.iter().map(|text| ("system", text));
        let turns = conversation.turns.iter().map(|turn| match turn.role {
            Role::User => ("user", &turn.content),
            Role::Model => ("assistant", &turn.content),
        });
        for (role, content) in system.chain(turns) {
            // Templates ask whether a content is empty.
            let seen = match content.trim() {
                "" => String::new(),
                _ => format!("{}{}{}", MARK.0, contents.len(), MARK.1),
            };
            contents.push(content.trim());
            messages.push(context! { role, content => seen });
        }
        let context = context! {
            messages,
            add_generation_prompt => true,
            enable_thinking => conversation.think,
            bos_token => bos.unwrap_or_default(),
            eos_token => "<eos>",
        };
        let out = self.bounded(move |environment| {
            let mut out = Bounded(Vec::new());
            let template = environment.get_template("chat")?;
            template.render_captured_to(context, &mut out)?;
            Ok(out)
        })?;
        let text = String::from_utf8(out.0).with_context(|| self.origin.clone())?;
        self.pieces(&text, &contents)
    }

    fn pieces(&self, text: &str, contents: &[&str]) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        let mut seen = vec![false; contents.len()];
        let mut parts = text.split(MARK.0);
        let template = |text: &str| Piece::Template(text.into());
        pieces.extend(parts.next().map(template));
        for part in parts {
            let mark = part.split_once(MARK.1);
            let index = mark.and_then(|(index, _)| index.parse::<usize>().ok());
            let (Some((_, rest)), Some(index)) = (mark, index.filter(|&i| i < contents.len()))
            else {
                bail!(
                    "{}: the template changes what was said, want it whole",
                    self.origin
                );
            };
            seen[index] = true;
            pieces.push(Piece::Content(contents[index].into()));
            pieces.push(template(rest));
        }
        if let Some(missing) = (0..contents.len()).find(|&i| !seen[i] && !contents[i].is_empty()) {
            bail!("{}: the template leaves out message {missing}", self.origin);
        }
        Ok(pieces)
    }

    /// What `work` does with the compiled template, within the bounds.
    fn bounded<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Environment) -> Result<T, Error> + Send + 'static,
    ) -> Result<T> {
        if self.broken.get().is_none() {
            let source = self.source.clone();
            match meter::run(MEMORY, TIME, move || work(&environment(&source)?)) {
                Ok(done) => return done.map_err(|e| self.failed(e)),
                Err(why) => self.broken.set(why).ok(),
            };
        }
        let why = self.broken.get().map_or("", String::as_str);
        bail!("{}: the chat template failed: {why}", self.origin)
    }

    fn failed(&self, error: Error) -> anyhow::Error {
        let line = error.line().map_or(String::new(), |l| format!(":{l}"));
        // The first cause says what happened; those after it, that it did.
        let mut cause = std::error::Error::source(&error);
        let mut source = None;
        while let Some(error) = cause {
            source = Some(error.to_string());
            cause = error.source();
        }
        let detail = source.or_else(|| error.detail().map(str::to_string));
        let detail = detail.map_or(String::new(), |detail| format!(": {detail}"));
        anyhow!(
            "{}{line}: the chat template failed: {}{detail}",
            self.origin,
            error.kind()
        )
    }
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn environment(source: &str) -> Result<Environment<'_>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(STEPS));
    environment.set_recursion_limit(NESTING);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_template("chat", source)?;
    Ok(environment)
}

/// Refuses to grow past [`LARGEST_OUTPUT`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > LARGEST_OUTPUT {
            let message = format!("it writes more than {LARGEST_OUTPUT} bytes");
            return Err(std::io::Error::other(message));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
