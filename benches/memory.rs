//! Peak memory of reading a prompt, by its length: one fresh process a length, since a peak can't be taken back.
//!
//! `cargo bench --bench memory` prints the table and writes the plot to docs/memory.svg.

use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Cache, Config, Model, Weights};
use plotters::prelude::*;
use std::path::Path;
use std::process::Command;

const LENGTHS: [usize; 6] = [1024, 4096, 8192, 16_384, 24_576, 32_768];
const CHUNK: usize = 512;
/// Set in the processes that measure one length each.
const LENGTH: &str = "GEM_MEMORY_BENCH_LENGTH";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    if let Ok(length) = std::env::var(LENGTH) {
        println!("{}", read_prompt(length.parse()?)?);
        return Ok(());
    }
    let mut peaks = vec![];
    println!("| prompt tokens | peak memory MiB | caches MiB | a T x T mask alone would take MiB |\n|---:|---:|---:|---:|");
    let config = Config::from_file(folder().join("config.json"))?;
    for length in LENGTHS {
        let output = Command::new(std::env::current_exe()?)
            .env(LENGTH, length.to_string())
            .output()?;
        let text = String::from_utf8(output.stdout)?;
        let peak: u64 = text.trim().parse().map_err(|e| {
            format!(
                "{length} tokens: {e}, stderr: {}",
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
        let (sliding, full) = Cache::planned_bytes(&config, length, DType::F32);
        println!(
            "| {length} | {:.1} | {:.1} | {:.0} |",
            mib(peak),
            mib((sliding + full) as u64),
            mib(4 * (length as u64).pow(2))
        );
        peaks.push((length as f64, mib(peak)));
    }
    let (slope, intercept, worst) = line(&peaks);
    println!("\nline: {intercept:.1} MiB + {:.2} KiB a token; no point is further than {worst:.1} MiB from it", slope * 1024.0);
    plot(&peaks, |x| intercept + slope * x)
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-gemma4"))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// Feeds `length` tokens to the trained model and returns the peak memory of this process in bytes.
fn read_prompt(length: usize) -> Outcome<u64> {
    let config = Config::from_file(folder().join("config.json"))?;
    let weights = Weights::open_dir(folder())?;
    let model = Model::new(&config, weights.var_builder(DType::F32, &Device::Cpu))?;
    let mut cache = model.new_cache(AttentionPath::default())?;
    cache.reserve(length);
    // Any ids do; their attention costs the same memory.
    let ids: Vec<u32> = (0..length as u32)
        .map(|i| 300 + i.wrapping_mul(2_654_435_761) % 3700)
        .collect();
    let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    model.prefill(&input, CHUNK, &mut cache)?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .ok_or("no VmHWM in /proc/self/status")?;
    Ok(1024 * peak.trim().trim_end_matches("kB").trim().parse::<u64>()?)
}

/// Least squares: slope, intercept and the largest distance of a point.
fn line(points: &[(f64, f64)]) -> (f64, f64, f64) {
    let n = points.len() as f64;
    let (x, y) = points
        .iter()
        .fold((0.0, 0.0), |(x, y), p| (x + p.0 / n, y + p.1 / n));
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>()
        / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>();
    let intercept = y - slope * x;
    let worst = points
        .iter()
        .map(|p| (p.1 - intercept - slope * p.0).abs())
        .fold(0.0, f64::max);
    (slope, intercept, worst)
}

fn plot(peaks: &[(f64, f64)], fitted: impl Fn(f64) -> f64) -> Outcome<()> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.svg");
    let root = SVGBackend::new(&file, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let (longest, highest) = peaks
        .iter()
        .fold((0.0f64, 0.0f64), |(x, y), p| (x.max(p.0), y.max(p.1)));
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption(
            "Peak memory of reading a prompt, tiny-gemma4 in f32, chunks of 512",
            ("sans-serif", 18),
        )
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..longest * 1.05, 0.0..highest * 1.15)?;
    chart
        .configure_mesh()
        .x_desc("prompt tokens")
        .y_desc("peak memory, MiB")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    chart.draw_series(LineSeries::new(
        [0.0, longest].map(|x| (x, fitted(x))),
        BLACK.mix(0.4),
    ))?;
    chart.draw_series(peaks.iter().map(|&p| Circle::new(p, 4, BLUE.filled())))?;
    root.present()?;
    println!("wrote docs/memory.svg");
    Ok(())
}
