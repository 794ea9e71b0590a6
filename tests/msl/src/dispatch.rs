use crate::{Buffer, Element};

/// One dispatch of a kernel: what a Metal compute encoder would be told.
pub struct Dispatch<'a> {
    /// Function name, or the `host_name` of an instantiation.
    pub entry: &'a str,
    /// Threadgroups in the grid, each at least 1.
    pub threadgroups: [u32; 3],
    /// Threads in a threadgroup, each at least 1.
    pub threads: [u32; 3],
    /// The buffer arguments.
    pub buffers: Vec<Binding<'a>>,
    /// Bytes of `[[threadgroup(i)]]`, by index; 0: not set.
    pub threadgroup_bytes: Vec<u32>,
    /// Function constants. Those left out are zero, and not defined for `is_function_constant_defined`.
    pub constants: Vec<(u32, Constant)>,
    /// Order of execution. 0: threads, SIMD groups and threadgroups in order; others: a random order that depends on
    /// nothing but the seed.
    pub seed: u64,
    /// What the device allows.
    pub limits: Limits,
    /// What is not reported.
    pub tolerance: Tolerance,
}

/// A buffer argument.
pub struct Binding<'a> {
    /// `n` of `[[buffer(n)]]`, 0 to 30.
    pub index: u32,
    /// Bytes left out at the front of the memory.
    pub offset: usize,
    /// What is bound, and what the kernel may do with it.
    pub memory: Memory<'a>,
}

/// The memory of a [`Binding`], by what the kernel may do with it. When one buffer is bound twice, its traffic is
/// counted for one of the two.
pub enum Memory<'a> {
    /// Read only: a write is an error.
    Input(&'a Buffer),
    /// What it held is gone when the dispatch starts; the kernel may read back what it wrote itself.
    Output(&'a mut Buffer),
    /// Read and written.
    InOut(&'a mut Buffer),
    /// A copy, read only: a struct of parameters or a scalar, as `setBytes` passes it.
    Bytes(Vec<u8>),
}

/// The value of a function constant; its size must be that of the type in the text.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Constant {
    Bool(bool),
    F32(f32),
    U16(u16),
    I32(i32),
    U32(u32),
    U64(u64),
}

impl Constant {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        match self {
            Constant::Bool(v) => vec![u8::from(v)],
            Constant::F32(v) => v.to_ne_bytes().to_vec(),
            Constant::U16(v) => v.to_ne_bytes().to_vec(),
            Constant::I32(v) => v.to_ne_bytes().to_vec(),
            Constant::U32(v) => v.to_ne_bytes().to_vec(),
            Constant::U64(v) => v.to_ne_bytes().to_vec(),
        }
    }
}

/// Limits of the device. The default is that of Apple's GPUs since the M1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `maxTotalThreadsPerThreadgroup` of the pipeline: lower than 1024 for a kernel that needs many registers, which
    /// only the device can tell.
    pub threads: u32,
    /// Threadgroup memory, that of the text and of the dispatch together.
    pub threadgroup_bytes: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            threads: 1024,
            threadgroup_bytes: 32768,
        }
    }
}

/// Faults of published kernels that can be let pass. The default lets none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tolerance {
    /// A barrier with `mem_flags::mem_none` orders threadgroup memory, as on shipped devices.
    pub mem_none_orders: bool,
    /// A read through a buffer argument that is not bound gives all ones.
    pub unbound_reads: bool,
}

impl<'a> Dispatch<'a> {
    /// A dispatch without arguments, in order, with the default limits.
    pub fn new(entry: &'a str, threadgroups: [u32; 3], threads: [u32; 3]) -> Dispatch<'a> {
        Dispatch {
            entry,
            threadgroups,
            threads,
            buffers: Vec::new(),
            threadgroup_bytes: Vec::new(),
            constants: Vec::new(),
            seed: 0,
            limits: Limits::default(),
            tolerance: Tolerance::default(),
        }
    }

    /// Binds memory that the kernel only reads.
    pub fn input(self, index: u32, buffer: &'a Buffer) -> Self {
        self.bind(index, Memory::Input(buffer))
    }

    /// Binds memory that the kernel fills.
    pub fn output(self, index: u32, buffer: &'a mut Buffer) -> Self {
        self.bind(index, Memory::Output(buffer))
    }

    /// Binds memory that the kernel changes.
    pub fn in_out(self, index: u32, buffer: &'a mut Buffer) -> Self {
        self.bind(index, Memory::InOut(buffer))
    }

    /// Passes bytes, such as those of a struct of parameters.
    pub fn bytes(self, index: u32, bytes: &[u8]) -> Self {
        self.bind(index, Memory::Bytes(bytes.to_vec()))
    }

    /// Passes one scalar.
    pub fn value<T: Element>(self, index: u32, value: T) -> Self {
        let bytes = Buffer::new(&[value]).to_vec();
        self.bind(index, Memory::Bytes(bytes))
    }

    fn bind(mut self, index: u32, memory: Memory<'a>) -> Self {
        self.buffers.push(Binding {
            index,
            offset: 0,
            memory,
        });
        self
    }

    /// Leaves out the first `bytes` of the buffer bound last.
    pub fn offset(mut self, bytes: usize) -> Self {
        if let Some(binding) = self.buffers.last_mut() {
            binding.offset = bytes;
        }
        self
    }

    /// Sets the size of the next `[[threadgroup(i)]]`.
    pub fn threadgroup_memory(mut self, bytes: u32) -> Self {
        self.threadgroup_bytes.push(bytes);
        self
    }

    /// Sets a function constant.
    pub fn constant(mut self, index: u32, value: Constant) -> Self {
        self.constants.push((index, value));
        self
    }

    /// Sets the order of execution.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

impl Memory<'_> {
    pub(crate) fn buffer_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Memory::Output(buffer) | Memory::InOut(buffer) => Some(buffer),
            Memory::Input(_) | Memory::Bytes(_) => None,
        }
    }
}
