use crate::{Dispatch, Error, Module, Result, Stats};

/// The orders of execution of [`Module::run_all_schedules`]: in order, and four random ones.
pub const SEEDS: [u64; 5] = [0, 1, 2, 3, 4];

impl Module {
    /// Runs the dispatch once for each of `seeds`, each time from the same memory, and leaves the outputs of the last.
    ///
    /// # Errors
    ///
    /// As [`Module::run`], and when an output or a count differs from that of the first seed.
    pub fn run_all_schedules(&self, dispatch: &mut Dispatch, seeds: &[u64]) -> Result<Stats> {
        let before: Vec<_> = mutable(dispatch).map(|(_, b)| b.save()).collect();
        let own_seed = dispatch.seed;
        let mut first: Option<(u64, Stats, Vec<Vec<u8>>)> = None;
        for &seed in seeds {
            for ((_, buffer), saved) in mutable(dispatch).zip(&before) {
                buffer.restore(saved);
            }
            dispatch.seed = seed;
            let result = self.run(dispatch);
            dispatch.seed = own_seed;
            let stats = result?;
            let after: Vec<Vec<u8>> = mutable(dispatch).map(|(_, b)| b.to_vec()).collect();
            let Some((first_seed, first_stats, first_after)) = &first else {
                first = Some((seed, stats, after));
                continue;
            };
            let differs = |message: String| Error::Kernel {
                entry: dispatch.entry.to_string(),
                reports: vec![format!("seeds {first_seed} and {seed}: {message}")],
            };
            let indices: Vec<u32> = mutable(dispatch).map(|(index, _)| index).collect();
            for ((index, a), b) in indices.iter().zip(first_after).zip(&after) {
                if let Some(at) = a.iter().zip(b).position(|(x, y)| x != y) {
                    return Err(differs(format!("buffer {index} differs from byte {at} on")));
                }
            }
            if *first_stats != stats {
                return Err(differs(format!(
                    "counts differ: {first_stats:?} and {stats:?}"
                )));
            }
        }
        let missing = || Error::Dispatch {
            entry: dispatch.entry.to_string(),
            message: "no seeds to run".to_string(),
        };
        first.map(|(_, stats, _)| stats).ok_or_else(missing)
    }
}

fn mutable<'d, 'a>(
    dispatch: &'d mut Dispatch<'a>,
) -> impl Iterator<Item = (u32, &'d mut crate::Buffer)> + use<'d, 'a> {
    dispatch.buffers.iter_mut().filter_map(|binding| {
        let index = binding.index;
        binding.memory.buffer_mut().map(|buffer| (index, buffer))
    })
}
