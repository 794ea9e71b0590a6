//! Several projections of one input as one product.
//!
//! ```text
//! y = xs w^T,   w = the rows of all blocks, one block after the other
//! ```
//!
//! The weight is packed once, and one product writes one f32 buffer of which every result is a view: one launch instead of
//! one per block, xs is read once, and half-precision weights are never rounded on the way. On the CPU the bits of
//! an element depend on its row of xs and its row of w alone, on Metal also on whether the call has more than 8 rows; so a block
//! gives exactly what it would give on its own. Not so on CUDA, where most calls are one product of cuBLAS, which chooses its
//! kernel by the shape.

mod cpu;
pub mod geometry;
pub mod gpu;

use std::sync::Arc;

use candle::{bail, CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage};
use candle::{Result, Shape, Tensor, D};

use crate::backend::no_code_for;
use crate::cpu::lines::zeros_on_a_line;
pub use crate::cpu::CpuKernel;
use crate::memory;
pub use geometry::ProjectionGeometry;

const NAME: &str = "fused_projection";

/// Rows of the packed weight.
#[derive(Debug, Clone)]
struct Block {
    name: String,
    first: usize,
    rows: usize,
}

/// Named blocks of rows, packed into one weight `(rows, hidden)`. A clone is the same memory.
///
/// ```
/// use candle::{DType, Device, Tensor};
/// use gem::projection::FusedProjection;
/// # fn main() -> candle::Result<()> {
/// let (wq, wk) = (
///     Tensor::ones((64, 32), DType::BF16, &Device::Cpu)?,
///     Tensor::ones((16, 32), DType::BF16, &Device::Cpu)?,
/// );
/// let projection = FusedProjection::pack(&[("q", &wq), ("k", &wk)])?;
/// let xs = Tensor::ones((1, 5, 32), DType::BF16, &Device::Cpu)?;
/// let results = projection.forward(&xs)?;
/// assert_eq!(results.get("k")?.dims(), [1, 5, 16]);
/// assert_eq!(results.packed().dims(), [1, 5, 80]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct FusedProjection {
    weight: Tensor,
    blocks: Arc<[Block]>,
    cpu_kernel: Option<CpuKernel>,
}

impl FusedProjection {
    /// Copies the blocks, each `(rows, hidden)`, into one weight in this order.
    ///
    /// # Errors
    ///
    /// Names the block, what it got and what it wants: no block at all, an empty or repeated name, a shape that is empty or
    /// not `(rows, hidden)` with the hidden size of the first block, a dtype other than f32, f16 and bf16 or than that of
    /// the first block, another device, or a weight that is being trained.
    pub fn pack(blocks: &[(&str, &Tensor)]) -> Result<Self> {
        let (rows, hidden) = geometry::check_blocks(NAME, blocks)?;
        let (_, like) = blocks[0];
        let (dtype, device) = (like.dtype(), like.device());
        for (name, block) in blocks.iter().filter(|(_, block)| !block.is_contiguous()) {
            let what = format_args!("a copy of block {name:?} of shape {:?}", block.dims());
            memory::check(NAME, what, block.dims(), dtype.size_in_bytes(), device)?;
        }
        let total = rows.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        let what = format_args!("a weight of {total} rows of {hidden}");
        let weight = zeros_on_a_line(NAME, what, (total, hidden), dtype, device)?;
        let mut first = 0;
        let mut packed = Vec::with_capacity(blocks.len());
        for ((name, block), rows) in blocks.iter().zip(rows) {
            weight.slice_set(&block.contiguous()?, 0, first)?;
            packed.push(Block {
                name: name.to_string(),
                first,
                rows,
            });
            first += rows;
        }
        Ok(Self {
            weight,
            blocks: packed.into(),
            cpu_kernel: None,
        })
    }

    /// Runs this kernel on the CPU and no other; an error if the CPU cannot.
    pub fn cpu_kernel(self, kernel: CpuKernel) -> Self {
        Self {
            cpu_kernel: Some(kernel),
            ..self
        }
    }

    /// The packed weight, `(rows, hidden)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Names of the blocks in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.blocks.iter().map(|block| block.name.as_str())
    }

    /// The rows of one block: a contiguous view of the packed weight.
    ///
    /// # Errors
    ///
    /// No block of this name.
    pub fn block(&self, name: &str) -> Result<Tensor> {
        let block = find(&self.blocks, name)?;
        self.weight.narrow(0, block.first, block.rows)
    }

    /// The first `count` blocks alone, on the same memory.
    ///
    /// # Errors
    ///
    /// None, or more than there are.
    pub fn first(&self, count: usize) -> Result<Self> {
        let Some(last) = count.checked_sub(1).and_then(|last| self.blocks.get(last)) else {
            bail!(
                "{NAME}: got a count of {count} blocks, want 1 to {}",
                self.blocks.len()
            );
        };
        Ok(Self {
            weight: self.weight.narrow(0, 0, last.first + last.rows)?,
            blocks: self.blocks[..count].into(),
            ..*self
        })
    }

    /// What [`FusedProjection::forward`] would run, or why it would not.
    pub fn check(&self, xs: &Tensor) -> Result<ProjectionGeometry> {
        ProjectionGeometry::new(NAME, xs, &self.weight)
    }

    /// All blocks times `xs`, `(.., hidden)`, in the dtype of the weight or in f32; any strides as long as the last dimension
    /// is contiguous and the others step from row to row at one stride.
    ///
    /// Sums are f32, and so is the result. Training through it fails with candle's "backward not supported".
    ///
    /// # Errors
    ///
    /// xs of another hidden size, dtype or device, empty, or with strides that do not fit; a device that there is no code
    /// for.
    pub fn forward(&self, xs: &Tensor) -> Result<Projections> {
        Ok(Projections {
            packed: product(xs, &self.weight, self.cpu_kernel)?,
            blocks: self.blocks.clone(),
        })
    }
}

/// What a [`FusedProjection`] makes of one input: f32 views of one buffer.
#[derive(Debug, Clone)]
pub struct Projections {
    packed: Tensor,
    blocks: Arc<[Block]>,
}

impl Projections {
    /// The buffer, `(.., rows)`, contiguous.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }

    /// The result of one block, `(.., rows of the block)`: a view whose rows are as far apart as those of the buffer.
    ///
    /// # Errors
    ///
    /// No block of this name.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        self.view(find(&self.blocks, name)?)
    }

    /// Names and results in the order of the blocks.
    pub fn iter(&self) -> impl Iterator<Item = Result<(&str, Tensor)>> {
        let blocks = self.blocks.iter();
        blocks.map(|block| Ok((block.name.as_str(), self.view(block)?)))
    }

    fn view(&self, block: &Block) -> Result<Tensor> {
        self.packed.narrow(D::Minus1, block.first, block.rows)
    }
}

fn find<'a>(blocks: &'a [Block], name: &str) -> Result<&'a Block> {
    match blocks.iter().find(|block| block.name == name) {
        Some(block) => Ok(block),
        None => {
            let names: Vec<&str> = blocks.iter().map(|b| b.name.as_str()).collect();
            bail!("{NAME}: there is no block {name:?}, want one of {names:?}")
        }
    }
}

/// `xs` `(.., hidden)` times every row of `weight`, f32 `(.., weight rows)`: a product that widens no weight.
pub(crate) fn product(
    xs: &Tensor,
    weight: &Tensor,
    cpu_kernel: Option<CpuKernel>,
) -> Result<Tensor> {
    ProjectionGeometry::new(NAME, xs, weight)?;
    xs.apply_op2(weight, Op { cpu_kernel })
}

struct Op {
    cpu_kernel: Option<CpuKernel>,
}

impl CustomOp2 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        w: &CpuStorage,
        w_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dtype = |s: &CpuStorage| candle::backend::BackendStorage::dtype(s);
        let geometry = ProjectionGeometry::from_layouts(NAME, (x_l, dtype(x)), (w_l, dtype(w)))?;
        let kernel = self.cpu_kernel.unwrap_or_else(CpuKernel::best);
        let y = cpu::forward(NAME, &geometry, kernel, x, w)?;
        Ok((CpuStorage::F32(y), geometry.result_shape(x_l)))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Err(no_code_for(NAME, "xs and the weight", "CUDA"))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_l: &Layout,
        w: &CudaStorage,
        w_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use candle::backend::BackendStorage;
        let geometry = ProjectionGeometry::from_layouts(NAME, (x_l, x.dtype()), (w_l, w.dtype()))?;
        let y = match gpu::cuda_route(&geometry)? {
            gpu::CudaRoute::Kernels(plan) => crate::backend::cuda::run_one(&plan, &[x, w])?,
            gpu::CudaRoute::Library => crate::backend::cuda::gemm(NAME, &geometry, x, w)?,
        };
        Ok((y, geometry.result_shape(x_l)))
    }

    #[cfg(not(feature = "metal"))]
    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        Err(no_code_for(NAME, "xs and the weight", "Metal"))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        x: &MetalStorage,
        x_l: &Layout,
        w: &MetalStorage,
        w_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        use candle::backend::BackendStorage;
        let geometry = ProjectionGeometry::from_layouts(NAME, (x_l, x.dtype()), (w_l, w.dtype()))?;
        let y = crate::backend::metal::run_one(&gpu::plan(&geometry, None)?, &[x, w])?;
        Ok((y, geometry.result_shape(x_l)))
    }
}
