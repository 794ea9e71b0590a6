use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use crate::compiler::{self, Compiler};
use crate::ffi::{self, RawBuffer, RawDispatch};
use crate::{
    lines, translate, Buffer, Dispatch, Error, Memory, MemoryTraffic, Result, Stats, Traffic,
};

/// How a text is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Optimised, for full shapes. Finds divergence, accesses far out of bounds, too much threadgroup memory.
    Fast,
    /// Every access is judged and counted, several times slower, and each byte that can be written takes 44 more.
    Checked,
}

/// A compiled library.
pub struct Module {
    library: &'static Library,
    mode: Mode,
}

/// Loaded once for a process and never unloaded: its fault handlers stay installed.
struct Library {
    handle: libloading::Library,
    path: PathBuf,
    /// Function constants are globals of the library: one dispatch at a time.
    dispatch: Mutex<()>,
}

impl Module {
    /// Compiles texts as one library: those whose names end in `.h` when another includes them, the others in order.
    /// A text may include these headers and Metal's own, nothing else.
    ///
    /// `entries` says which kernels to keep; empty: all of them. A library of many templates compiles long.
    ///
    /// The result is kept in the build folder, under a digest of all that it depends on.
    ///
    /// # Errors
    ///
    /// [`Error::Source`] when the texts do not compile, with the compiler's messages; [`Error::Machine`] when there is
    /// no C++ compiler.
    pub fn compile(files: &[(&str, &str)], entries: &[&str], mode: Mode) -> Result<Module> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            let message = "kernels run on x86-64 Linux only";
            return Err(Error::Machine(message.to_string()));
        }
        check_names(files)?;
        let compiler = Compiler::find()?;
        let identity = compiler.identity(mode);
        let mut parts = vec![identity.as_str()];
        files
            .iter()
            .for_each(|(name, text)| parts.extend([name, text]));
        parts.push("entries");
        parts.extend(entries);
        let digest = compiler::digest(&parts);
        let folder = compiler::cached("library", &digest, |folder| {
            compiler::write_texts(folder, files)?;
            let preprocessed = compiler.preprocess(folder)?;
            let unit = translate::translate(&preprocessed, entries).map_err(Error::Source)?;
            let code = translate::emit(&unit, mode == Mode::Checked).map_err(Error::Source)?;
            compiler::write(&folder.join("unit.cpp"), &code)?;
            compiler.build(folder, mode)
        })?;
        let library = load(folder.join("library.so"))?;
        Ok(Module { library, mode })
    }

    /// The mode it was compiled for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Runs one dispatch to its end. Dispatches of one module wait for each other.
    ///
    /// # Errors
    ///
    /// [`Error::Dispatch`] when the dispatch does not fit the kernel or the limits, [`Error::Kernel`] when the kernel
    /// is at fault; the outputs are then worthless.
    pub fn run(&self, dispatch: &mut Dispatch) -> Result<Stats> {
        let refuse = |message: String| Error::Dispatch {
            entry: dispatch.entry.to_string(),
            message,
        };
        check(dispatch).map_err(refuse)?;
        let _one_at_a_time = lock(&self.library.dispatch);
        self.set_constants(dispatch)?;
        let copies = copies_of_bytes(dispatch);
        let mut buffers = bind(dispatch, &copies);
        let mut threadgroup_bytes = [0; ffi::BUFFERS];
        for (size, bytes) in threadgroup_bytes
            .iter_mut()
            .zip(&dispatch.threadgroup_bytes)
        {
            *size = *bytes;
        }
        let entry = CString::new(dispatch.entry).map_err(|e| Error::Dispatch {
            entry: dispatch.entry.to_string(),
            message: e.to_string(),
        })?;
        let mut message = vec![0u8; 32768];
        let tolerance = dispatch.tolerance;
        let mut raw = RawDispatch {
            entry: entry.as_ptr(),
            groups: dispatch.threadgroups,
            threads: dispatch.threads,
            buffers: buffers.as_mut_ptr(),
            threadgroup_bytes: threadgroup_bytes.as_ptr(),
            seed: dispatch.seed,
            tolerate: u32::from(tolerance.mem_none_orders) * ffi::MEM_NONE_ORDERS
                + u32::from(tolerance.unbound_reads) * ffi::UNBOUND_READS,
            max_threads: dispatch.limits.threads,
            max_threadgroup_bytes: dispatch.limits.threadgroup_bytes,
            used_threadgroup_bytes: 0,
            error: message.as_mut_ptr().cast(),
            error_capacity: message.len() as u64,
            barriers: 0,
            simd_barriers: 0,
            collectives: 0,
            matrix_multiplies: 0,
            traffic: [Traffic::default(); ffi::BUFFERS],
            threadgroup_traffic: Traffic::default(),
        };
        let run: ffi::Run = self.library.function("msl_dispatch")?;
        // SAFETY: `raw` matches shim/abi.h; what it points to outlives the call, and the dispatch holds the buffers
        // that are written by &mut.
        let status = unsafe { run(&mut raw) };
        self.outcome(status, &message, dispatch)?;
        if self.mode == Mode::Fast {
            let written = dispatch.buffers.iter_mut();
            written
                .filter_map(|b| b.memory.buffer_mut())
                .for_each(Buffer::mark_all_written);
        }
        Ok(self.stats(dispatch, &raw, &buffers))
    }

    fn set_constants(&self, dispatch: &Dispatch) -> Result<()> {
        let clear: ffi::ClearConstants = self.library.function("msl_clear_constants")?;
        let set: ffi::SetConstant = self.library.function("msl_set_constant")?;
        // SAFETY: runtime.cpp defines both with these types; `set` copies as many bytes as it is told.
        unsafe { clear() };
        for (index, constant) in &dispatch.constants {
            let bytes = constant.to_bytes();
            // SAFETY: as above.
            let status = unsafe { set(*index, bytes.as_ptr().cast(), bytes.len() as u32) };
            let message = match status {
                0 => continue,
                -1 => format!("function constant {index} is not in the texts"),
                _ => format!("function constant {index} has another size than {constant:?}"),
            };
            return Err(Error::Dispatch {
                entry: dispatch.entry.to_string(),
                message,
            });
        }
        Ok(())
    }

    fn outcome(&self, status: i32, message: &[u8], dispatch: &Dispatch) -> Result<()> {
        let entry = dispatch.entry.to_string();
        if status == 0 {
            return Ok(());
        }
        let end = message.iter().position(|b| *b == 0);
        let text = String::from_utf8_lossy(&message[..end.unwrap_or(message.len())]);
        if status == 1 {
            let text = lines::resolve(&text, &self.library.path);
            let reports = text.split('\x0c').map(str::to_string).collect();
            return Err(Error::Kernel { entry, reports });
        }
        let message = match status {
            2 => "the module has no such kernel".to_string(),
            _ => text.replace('\x0c', "; "),
        };
        Err(Error::Dispatch { entry, message })
    }

    fn stats(&self, dispatch: &Dispatch, raw: &RawDispatch, buffers: &[RawBuffer]) -> Stats {
        let product = |n: [u32; 3]| n.iter().map(|n| u64::from(*n)).product::<u64>();
        let threadgroups = product(dispatch.threadgroups);
        let memory = (self.mode == Mode::Checked).then(|| {
            let mut memory = MemoryTraffic {
                threadgroup: raw.threadgroup_traffic,
                ..MemoryTraffic::default()
            };
            for (i, buffer) in buffers.iter().enumerate() {
                let space = match buffer.constant_space {
                    0 => &mut memory.device,
                    _ => &mut memory.constant,
                };
                if buffer.role != ffi::UNBOUND {
                    space.insert(i as u32, raw.traffic[i]);
                }
            }
            memory
        });
        Stats {
            threadgroups,
            threads: threadgroups * product(dispatch.threads),
            threadgroup_bytes: raw.used_threadgroup_bytes,
            barriers: raw.barriers,
            simd_barriers: raw.simd_barriers,
            collectives: raw.collectives,
            matrix_multiplies: raw.matrix_multiplies,
            memory,
        }
    }
}

impl Library {
    fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the callers ask for functions of runtime.cpp with the types that it gives them.
        let symbol = unsafe { self.handle.get::<F>(name.as_bytes()) };
        let symbol = symbol.map_err(|e| Error::Machine(format!("{}: {e}", self.path.display())))?;
        Ok(*symbol)
    }
}

fn load(path: PathBuf) -> Result<&'static Library> {
    static LOADED: Mutex<Option<HashMap<PathBuf, &'static Library>>> = Mutex::new(None);
    let mut loaded = lock(&LOADED);
    let loaded = loaded.get_or_insert_with(HashMap::new);
    if let Some(library) = loaded.get(&path) {
        return Ok(library);
    }
    // SAFETY: a library that this crate compiled; it runs no code when it is loaded.
    let handle = unsafe { libloading::Library::new(&path) };
    let handle = handle.map_err(|e| Error::Machine(format!("{}: {e}", path.display())))?;
    let library: &Library = Box::leak(Box::new(Library {
        handle,
        path: path.clone(),
        dispatch: Mutex::new(()),
    }));
    loaded.insert(path, library);
    Ok(library)
}

/// A panic in another test leaves nothing half done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn check_names(files: &[(&str, &str)]) -> Result<()> {
    for (i, (name, _)) in files.iter().enumerate() {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || !name.chars().all(plain) || name.starts_with('.') {
            return Err(Error::Source(format!("{name:?} is no plain file name")));
        }
        if files[..i].iter().any(|(other, _)| other == name) {
            return Err(Error::Source(format!("{name}: given twice")));
        }
    }
    if files.iter().all(|(name, _)| name.ends_with(".h")) {
        return Err(Error::Source("no text besides headers".to_string()));
    }
    Ok(())
}

fn check(dispatch: &Dispatch) -> std::result::Result<(), String> {
    let threads: u64 = dispatch.threads.iter().map(|n| u64::from(*n)).product();
    let limit = dispatch.limits.threads;
    if threads > u64::from(limit.min(1024)) {
        return Err(format!(
            "{threads} threads per threadgroup, the limit is {}",
            limit.min(1024)
        ));
    }
    if threads == 0 || dispatch.threadgroups.contains(&0) {
        let (groups, threads) = (dispatch.threadgroups, dispatch.threads);
        return Err(format!(
            "an empty grid: {groups:?} threadgroups of {threads:?} threads"
        ));
    }
    for (i, binding) in dispatch.buffers.iter().enumerate() {
        let index = binding.index;
        if index as usize >= ffi::BUFFERS {
            return Err(format!("buffer {index}: Metal has the indices 0 to 30"));
        }
        if dispatch.buffers[..i].iter().any(|b| b.index == index) {
            return Err(format!("buffer {index} is bound twice"));
        }
        let bytes = match &binding.memory {
            Memory::Input(buffer) => buffer.bytes(),
            Memory::Output(buffer) | Memory::InOut(buffer) => buffer.bytes(),
            Memory::Bytes(bytes) => bytes.len(),
        };
        if binding.offset > bytes {
            return Err(format!(
                "buffer {index}: offset {} of {bytes} bytes",
                binding.offset
            ));
        }
    }
    if dispatch.threadgroup_bytes.len() > ffi::BUFFERS {
        return Err("threadgroup memory: Metal has the indices 0 to 30".to_string());
    }
    Ok(())
}

fn copies_of_bytes(dispatch: &Dispatch) -> HashMap<u32, Buffer> {
    let bytes = dispatch.buffers.iter().filter_map(|b| match &b.memory {
        Memory::Bytes(bytes) => Some((b.index, Buffer::new(bytes))),
        _ => None,
    });
    bytes.collect()
}

fn bind(dispatch: &mut Dispatch, copies: &HashMap<u32, Buffer>) -> [RawBuffer; ffi::BUFFERS] {
    let unbound = RawBuffer {
        data: std::ptr::null_mut(),
        bytes: 0,
        initialised: std::ptr::null_mut(),
        first_bit: 0,
        role: ffi::UNBOUND,
        constant_space: 0,
    };
    let mut raw = [unbound; ffi::BUFFERS];
    for binding in &mut dispatch.buffers {
        let offset = binding.offset;
        let (role, buffer, initialised) = match &mut binding.memory {
            Memory::Input(buffer) => {
                buffer.protect();
                // The runtime does not write to the bits of an input.
                (ffi::INPUT, &**buffer, buffer.initialised().cast_mut())
            }
            Memory::InOut(buffer) => {
                buffer.unprotect();
                let initialised = buffer.initialised_mut();
                (ffi::IN_OUT, &**buffer, initialised)
            }
            Memory::Output(buffer) => {
                buffer.poison(offset);
                let initialised = buffer.initialised_mut();
                (ffi::OUTPUT, &**buffer, initialised)
            }
            Memory::Bytes(_) => match copies.get(&binding.index) {
                Some(copy) => (ffi::INPUT, copy, std::ptr::null_mut()),
                None => continue,
            },
        };
        raw[binding.index as usize] = RawBuffer {
            // SAFETY: `check` refused an offset beyond the end.
            data: unsafe { buffer.data().add(offset) },
            bytes: (buffer.bytes() - offset) as u64,
            initialised,
            first_bit: offset as u64,
            role,
            constant_space: 0,
        };
    }
    raw
}

/// The texts for clang's C++ for OpenCL, which checks address spaces: see `strict/check.sh`.
///
/// # Errors
///
/// As [`Module::compile`].
pub fn address_space_check_unit(files: &[(&str, &str)]) -> Result<String> {
    check_names(files)?;
    let compiler = Compiler::find()?;
    let mut parts = vec![compiler.identity(Mode::Fast)];
    for (name, text) in files {
        parts.extend([name.to_string(), text.to_string()]);
    }
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let digest = compiler::digest(&parts);
    let folder = compiler::cached("strict", &digest, |folder| {
        compiler::write_texts(folder, files)
    })?;
    translate::strict(&compiler.preprocess(&folder)?).map_err(Error::Source)
}
