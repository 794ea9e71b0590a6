//! candle's attention of one query token against a cache at head size 512: its kernels, dispatched as it does. The tests of the
//! kernels that are compared with it read this file, too.

use msl::{candle_kernels, Buffer, Constant, Dispatch, Mode, Module, Result, Stats};

pub const DIM: usize = 512;

const FILE: &str = "scaled_dot_product_attention.metal";
const ENTRIES: [&str; 3] = [
    "sdpa_vector_float_512",
    "sdpa_vector_2pass_1_float_512",
    "sdpa_vector_2pass_2_float_512",
];

/// q `(heads, DIM)`, k and v `(kv_heads, tokens, DIM)`.
pub struct Decode {
    pub heads: usize,
    pub kv_heads: usize,
    pub tokens: usize,
    pub scale: f32,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

pub fn compile(mode: Mode) -> Module {
    let text = candle_kernels(FILE).unwrap();
    Module::compile(&[(FILE, &text)], &ENTRIES, mode).unwrap()
}

impl Decode {
    /// The arguments behind the outputs, from `index` on.
    fn scalars<'a>(&self, dispatch: Dispatch<'a>, index: u32) -> Dispatch<'a> {
        let stride = (self.tokens * DIM) as u64;
        dispatch
            .value(index, (self.heads / self.kv_heads) as i32)
            .value(index + 1, self.tokens as i32)
            .value(index + 2, stride)
            .value(index + 3, stride)
            .value(index + 4, self.scale)
            .value(index + 5, 1f32)
            .constant(20, Constant::Bool(false))
    }

    /// The output, and what the pass did.
    pub fn one_pass(&self, module: &Module, seeds: &[u64]) -> Result<(Vec<f32>, Vec<Stats>)> {
        let inputs = [&self.q, &self.k, &self.v].map(|x| Buffer::new(x));
        let mut out = Buffer::uninitialised(self.heads * DIM * 4);
        let dispatch = Dispatch::new(ENTRIES[0], [1, self.heads as u32, 1], [1024, 1, 1])
            .input(0, &inputs[0])
            .input(1, &inputs[1])
            .input(2, &inputs[2])
            .output(3, &mut out);
        let stats = module.run_all_schedules(&mut self.scalars(dispatch, 4), seeds)?;
        Ok((out.to_vec(), vec![stats]))
    }

    /// The output, and what each pass did.
    pub fn two_pass(&self, module: &Module, seeds: &[u64]) -> Result<(Vec<f32>, Vec<Stats>)> {
        let inputs = [&self.q, &self.k, &self.v].map(|x| Buffer::new(x));
        let heads = self.heads as u32;
        let mut partial = Buffer::uninitialised(self.heads * 32 * DIM * 4);
        let mut sums = Buffer::uninitialised(self.heads * 32 * 4);
        let mut maxs = Buffer::uninitialised(self.heads * 32 * 4);
        let dispatch = Dispatch::new(ENTRIES[1], [1, heads, 32], [256, 1, 1])
            .input(0, &inputs[0])
            .input(1, &inputs[1])
            .input(2, &inputs[2])
            .output(3, &mut partial)
            .output(4, &mut sums)
            .output(5, &mut maxs);
        let first = module.run_all_schedules(&mut self.scalars(dispatch, 6), seeds)?;
        let mut out = Buffer::uninitialised(self.heads * DIM * 4);
        let mut dispatch = Dispatch::new(ENTRIES[2], [1, heads, 1], [1024, 1, 1])
            .input(0, &partial)
            .input(1, &sums)
            .input(2, &maxs)
            .output(3, &mut out);
        let second = module.run_all_schedules(&mut dispatch, seeds)?;
        Ok((out.to_vec(), vec![first, second]))
    }
}
