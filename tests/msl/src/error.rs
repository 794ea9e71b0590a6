use std::fmt;

/// Why a text did not compile or a dispatch did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The machine lacks something: a C++ compiler, address space, a folder to write to.
    Machine(String),
    /// The texts are not Metal, or use what the harness does not know.
    Source(String),
    /// The dispatch does not fit the kernel or its limits. Nothing ran.
    Dispatch {
        /// Entry name.
        entry: String,
        /// What does not fit.
        message: String,
    },
    /// The kernel is at fault. One report for each place and kind of fault, in the first threadgroup that had any.
    Kernel {
        /// Entry name.
        entry: String,
        /// Each names the memory and the line of the text.
        reports: Vec<String>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Machine(message) | Error::Source(message) => write!(f, "msl: {message}"),
            Error::Dispatch { entry, message } => write!(f, "msl: kernel {entry}: {message}"),
            Error::Kernel { entry, reports } => {
                write!(f, "msl: kernel {entry}: {}", reports.join("\n"))
            }
        }
    }
}

impl std::error::Error for Error {}
