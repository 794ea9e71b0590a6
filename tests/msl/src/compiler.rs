//! The machine's C++ compiler, and the cache of what it made.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::{translate, Error, Mode, Result};

macro_rules! shim {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../shim/", $name)))),*] };
}
/// The C++ side, by file name.
pub const SHIM: &[(&str, &str)] = shim!(
    "abi.h",
    "access.h",
    "atomic.h",
    "faults.h",
    "launch.h",
    "limits.h",
    "math.h",
    "matrix.h",
    "metal.h",
    "runtime.cpp",
    "schedule.h",
    "simd.h",
    "state.h",
    "types.h",
    "vector.h",
);

/// The headers that a `.metal` text may include; the shim stands for all of them.
const METAL_HEADERS: [&str; 15] = [
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_geometric",
    "metal_integer",
    "metal_limits",
    "metal_math",
    "metal_matrix",
    "metal_numeric",
    "metal_pack",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_stdlib",
    "metal_type_traits",
];

/// What Apple's compiler defines, as far as kernels ask.
const DEFINES: [&str; 7] = [
    "-D__METAL__=1",
    "-D__METAL_MACOS__=1",
    "-D__METAL_VERSION__=310",
    "-D__HAVE_BFLOAT__=1",
    "-D__HAVE_SIMDGROUP_REDUCTION__=1",
    "-D__HAVE_SIMDGROUP_MATRIX__=1",
    "-D__HAVE_SIMDGROUP_BARRIER__=1",
];

/// Looked for on PATH, in this order.
const NAMES: [&str; 8] = [
    "g++",
    "g++-15",
    "g++-14",
    "g++-13",
    "g++-12",
    "clang++",
    "clang++-20",
    "clang++-19",
];
const OLDEST_GXX: u32 = 12;
const OLDEST_CLANG: u32 = 19;

pub struct Compiler {
    program: &'static str,
    /// All that `--version` says: the cache must not survive an update.
    version: String,
    is_clang: bool,
}

impl Compiler {
    /// The first compiler on PATH that is new enough.
    pub fn find() -> Result<&'static Compiler> {
        static FOUND: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let mut refused = String::new();
            for program in NAMES {
                match Compiler::probe(program) {
                    Some(Ok(compiler)) => return Ok(compiler),
                    Some(Err(version)) => refused += &format!("; {program} is {version}"),
                    None => {}
                }
            }
            Err(format!(
                "Metal kernels are run by compiling them as C++, and there is no compiler on PATH: \
                 install g++ {OLDEST_GXX} or newer (Debian, Ubuntu: apt install g++), or clang++ \
                 {OLDEST_CLANG} or newer{refused}"
            ))
        });
        found.as_ref().map_err(|e| Error::Machine(e.clone()))
    }

    fn probe(program: &'static str) -> Option<std::result::Result<Compiler, String>> {
        let output = Command::new(program).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_clang = version.contains("clang");
        let number = Command::new(program).arg("-dumpversion").output().ok()?;
        let number = String::from_utf8_lossy(&number.stdout).trim().to_string();
        let major: u32 = number.split('.').next()?.parse().ok()?;
        let oldest = if is_clang { OLDEST_CLANG } else { OLDEST_GXX };
        if major < oldest {
            return Some(Err(number));
        }
        Some(Ok(Compiler {
            program,
            version,
            is_clang,
        }))
    }

    /// Runs the preprocessor on `library.cpp` in `folder`. Only the given texts and Metal's headers can be included.
    pub fn preprocess(&self, folder: &Path) -> Result<String> {
        let mut command = self.command(folder);
        command
            .args(["-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef"])
            .args(DEFINES)
            .args(["-isystem", "headers", "library.cpp"]);
        let output = run(command)?;
        // clang puts "./" in front of the names.
        Ok(String::from_utf8_lossy(&output).replace(" \"./", " \""))
    }

    /// Compiles `unit.cpp` in `folder` and links it with the runtime to `library.so`.
    pub fn build(&self, folder: &Path, mode: Mode) -> Result<()> {
        let mut command = self.command(folder);
        command
            .args(self.unit_flags(mode))
            .args(["-iquote"])
            .arg(self.shim_folder()?)
            .args(["-c", "unit.cpp", "-o", "unit.o"]);
        run(command)?;
        let mut command = self.command(folder);
        command
            .args(["-shared", "-Wl,-Bsymbolic", "-o", "library.so", "unit.o"])
            .arg(self.runtime()?)
            .args(["-lpthread", "-lm"]);
        run(command).map(drop)
    }

    /// All that the library depends on besides the texts.
    pub fn identity(&self, mode: Mode) -> String {
        let shim: String = SHIM.iter().map(|(_, text)| *text).collect();
        let flags = self.unit_flags(mode).join(" ");
        let version = &self.version;
        let defines = DEFINES.join(" ");
        format!(
            "{version}\n{flags}\n{defines}\n{shim}\n{}",
            translate::SOURCE
        )
    }

    fn command(&self, folder: &Path) -> Command {
        let mut command = Command::new(self.program);
        command.current_dir(folder).env("LC_ALL", "C");
        command
    }

    fn common_flags(&self) -> Vec<&'static str> {
        let mut flags = vec![
            "-std=gnu++17",
            "-fPIC",
            "-g",
            "-gdwarf-4",
            "-fno-exceptions",
            "-fno-math-errno",
            "-fno-strict-aliasing",
        ];
        // The device contracts or not as it likes; here every operation rounds.
        flags.push("-ffp-contract=off");
        if cpu_is_v3() {
            flags.push("-march=x86-64-v3");
        }
        // Thread variables of a library that is loaded late. Not initial-exec: a process has room for some dozens of libraries
        // that want it, and a test run loads more. With descriptors they are as quick while that room lasts.
        if !self.is_clang && cfg!(target_arch = "x86_64") {
            flags.push("-mtls-dialect=gnu2");
        }
        flags
    }

    fn unit_flags(&self, mode: Mode) -> Vec<&'static str> {
        let mut flags = self.common_flags();
        // Private variables without a value hold a pattern that shows.
        flags.extend(["-w", "-ftrivial-auto-var-init=pattern"]);
        match self.is_clang {
            true => flags.extend([
                "-Xclang",
                "-ffloat16-excess-precision=none",
                "-Xclang",
                "-fbfloat16-excess-precision=none",
                "-Wno-everything",
            ]),
            // Without: statics of templates would be shared between all loaded libraries.
            false => flags.push("-fno-gnu-unique"),
        }
        match mode {
            Mode::Fast => flags.push("-O2"),
            Mode::Checked => {
                flags.extend([
                    "-fsanitize=thread",
                    "-fsanitize=alignment,bounds,integer-divide-by-zero",
                ]);
                // A vector is one access, as on the device, not one for each component: g++ can be told, clang must
                // not optimise.
                match self.is_clang {
                    true => flags.extend([
                        "-O0",
                        "-mllvm",
                        "-tsan-instrument-func-entry-exit=0",
                        "-mllvm",
                        "-tsan-instrument-read-before-write=1",
                        "-mllvm",
                        "-tsan-instrument-atomics=0",
                    ]),
                    false => flags.extend([
                        "-O1",
                        "-fno-tree-sra",
                        "--param",
                        "tsan-instrument-func-entry-exit=0",
                    ]),
                }
            }
        }
        flags
    }

    fn shim_folder(&self) -> Result<PathBuf> {
        let digest = digest(&[&self.identity(Mode::Fast)]);
        cached("shim", &digest, |folder| {
            let mut files = SHIM.iter();
            files.try_for_each(|(name, text)| write(&folder.join(name), text))
        })
    }

    fn runtime(&self) -> Result<PathBuf> {
        let shim = self.shim_folder()?;
        let digest = digest(&[&self.identity(Mode::Fast)]);
        let folder = cached("runtime", &digest, |folder| {
            let mut command = self.command(folder);
            command
                .args(self.common_flags())
                .args(["-O2", "-c"])
                .arg(shim.join("runtime.cpp"))
                .args(["-o", "runtime.o"]);
            run(command).map(drop)
        })?;
        Ok(folder.join("runtime.o"))
    }
}

/// Hardware conversion of half, which x86-64-v3 has, is worth a lot.
fn cpu_is_v3() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c")
            && std::arch::is_x86_feature_detected!("bmi2")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// A library's texts, ready for the preprocessor.
pub fn write_texts(folder: &Path, files: &[(&str, &str)]) -> Result<()> {
    let headers = folder.join("headers");
    fs::create_dir_all(&headers).map_err(|e| machine(&headers, e))?;
    for name in METAL_HEADERS {
        write(&headers.join(name), "")?;
    }
    let mut library = String::new();
    for (name, text) in files {
        write(&folder.join(name), text)?;
        if !name.ends_with(".h") {
            library += &format!("#include \"{name}\"\n");
        }
    }
    write(&folder.join("library.cpp"), &library)
}

/// Content digest of `parts`, in hexadecimal.
pub fn digest(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let bytes = hasher.finalize();
    bytes.iter().take(12).map(|b| format!("{b:02x}")).collect()
}

/// The folder `kind-digest` of the cache. Where it is missing, `make` fills it, while other processes wait; it appears
/// complete or not at all.
pub fn cached(kind: &str, digest: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let cache = cache_folder()?;
    let folder = cache.join(format!("{kind}-{digest}"));
    if folder.exists() {
        return Ok(folder);
    }
    fs::create_dir_all(&cache).map_err(|e| machine(&cache, e))?;
    let lock_path = folder.with_extension("lock");
    let lock = File::create(&lock_path).map_err(|e| machine(&lock_path, e))?;
    lock.lock().map_err(|e| machine(&lock_path, e))?;
    if !folder.exists() {
        let part = folder.with_extension("part");
        // What a process left that was killed here.
        if part.exists() {
            fs::remove_dir_all(&part).map_err(|e| machine(&part, e))?;
        }
        fs::create_dir(&part).map_err(|e| machine(&part, e))?;
        make(&part)?;
        fs::rename(&part, &folder).map_err(|e| machine(&folder, e))?;
    }
    Ok(folder)
}

/// `msl` in the build folder that holds the program that runs, or, for a documentation test, that this crate was built in. The
/// first is right where the repository has moved since.
fn cache_folder() -> Result<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let built = Path::new(env!("OUT_DIR"));
    // cargo tags its build folder, wherever it is.
    let target = program
        .ancestors()
        .chain(built.ancestors())
        .find(|folder| folder.join("CACHEDIR.TAG").exists())
        .ok_or_else(|| {
            let (program, built) = (program.display(), built.display());
            Error::Machine(format!(
                "{program} and {built} are in no build folder of cargo"
            ))
        })?;
    Ok(target.join("msl"))
}

fn run(mut command: Command) -> Result<Vec<u8>> {
    let output = command
        .output()
        .map_err(|e| Error::Machine(format!("{:?}: {e}", command.get_program())))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let message: String = message.chars().take(6000).collect();
    Err(Error::Source(format!(
        "the texts do not compile:\n{message}"
    )))
}

pub fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| machine(path, e))
}

fn machine(path: &Path, error: std::io::Error) -> Error {
    Error::Machine(format!("{}: {error}", path.display()))
}
