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

/// One length: megabytes of the whole process, and of the caches in it.
struct Point {
    tokens: f64,
    peak: f64,
    caches: f64,
}

fn main() -> Outcome<()> {
    if let Ok(length) = std::env::var(LENGTH) {
        println!("{}", read_prompt(length.parse()?)?);
        return Ok(());
    }
    println!("| prompt tokens | peak MiB | of it caches MiB | the rest MiB | one T x T mask would be MiB |");
    println!("|---:|---:|---:|---:|---:|");
    let mut points = vec![];
    for length in LENGTHS {
        let point = measure(length)?;
        let mask = mib(4 * (length as u64).pow(2));
        let Point { peak, caches, .. } = point;
        println!(
            "| {length} | {peak:.0} | {caches:.0} | {:.0} | {mask:.0} |",
            peak - caches
        );
        points.push(point);
    }
    plot(&points)
}

fn measure(length: usize) -> Outcome<Point> {
    let output = Command::new(std::env::current_exe()?)
        .env(LENGTH, length.to_string())
        .output()?;
    let peak: u64 = String::from_utf8(output.stdout)?
        .trim()
        .parse()
        .map_err(|e| {
            format!(
                "{length} tokens: {e}: {}",
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
    let config = Config::from_file(folder().join("config.json"))?;
    let (sliding, full) =
        Cache::planned_bytes(&config, AttentionPath::default(), length, DType::F32);
    Ok(Point {
        tokens: length as f64,
        peak: mib(peak),
        caches: mib((sliding + full) as u64),
    })
}

fn folder() -> &'static Path {
    // Of the repository, in which cargo runs benchmarks.
    Path::new("assets/tiny-gemma4")
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
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.ok_or("no VmHWM in /proc/self/status")?;
    Ok(1024 * peak.trim().trim_end_matches("kB").trim().parse::<u64>()?)
}

fn plot(points: &[Point]) -> Outcome<()> {
    let docs = Path::new("docs");
    std::fs::create_dir_all(docs)?;
    let file = docs.join("memory.svg");
    let root = SVGBackend::new(&file, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let longest = points.iter().map(|p| p.tokens).fold(0.0, f64::max);
    let highest = points.iter().map(|p| p.peak).fold(0.0, f64::max);
    let title = "Memory of reading a prompt: trained model, f32, chunks of 512 tokens";
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption(title, ("sans-serif", 18))
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..longest * 1.05, 0.0..highest * 1.15)?;
    chart
        .configure_mesh()
        .x_desc("prompt tokens")
        .y_desc("MiB")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    let mut draw = |name: &str, color: RGBColor, megabytes: fn(&Point) -> f64| -> Outcome<()> {
        let line: Vec<(f64, f64)> = points.iter().map(|p| (p.tokens, megabytes(p))).collect();
        chart.draw_series(line.iter().map(|&p| Circle::new(p, 4, color.filled())))?;
        chart
            .draw_series(LineSeries::new(line, color))?
            .label(name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], color));
        Ok(())
    };
    draw("peak of the process", BLUE, |p| p.peak)?;
    draw("of it caches", RED, |p| p.caches)?;
    let mut labels = chart.configure_series_labels();
    labels
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3));
    labels.draw()?;
    root.present()?;
    println!("wrote docs/memory.svg");
    Ok(())
}
