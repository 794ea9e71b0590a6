//! The plots of docs/performance.md: milliseconds over keys, one line per arm, both axes logarithmic.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use plotters::prelude::*;

use crate::report::Receipt;

/// Arms worth a line, slowest last, with a colour each that also differs in lightness.
const ARMS: [(&str, &str, RGBColor); 5] = [
    ("limit", "read limit", RGBColor(150, 150, 150)),
    ("fused", "attention_d512", RGBColor(200, 40, 40)),
    ("torch", "PyTorch", RGBColor(40, 90, 200)),
    ("grouped", "candle, grouped", RGBColor(40, 150, 80)),
    ("repeat_kv", "candle, repeat_kv", RGBColor(140, 80, 170)),
];

type Line = BTreeMap<usize, f64>;

pub fn draw(receipts: &[Receipt], folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    for (kind, title) in [
        ("decode", "Decode, one query row"),
        ("prefill", "Causal prefill"),
    ] {
        for dtype in ["f32", "f16", "bf16"] {
            let lines = lines(receipts, kind == "prefill", dtype);
            if lines.iter().any(|line| !line.is_empty()) {
                let title = format!("{title}: 32 query heads, 4 KV heads, {dtype}");
                let path = folder.join(format!("{kind}-{dtype}.svg"));
                chart(&path, &title, &lines).with_context(|| path.display().to_string())?;
            }
        }
    }
    Ok(())
}

/// The medians of each arm; where receipts overlap, the first one counts.
fn lines(receipts: &[Receipt], prefill: bool, dtype: &str) -> [Line; ARMS.len()] {
    let cases = || {
        let cases = receipts.iter().flat_map(|receipt| &receipt.cases);
        cases.filter(move |case| {
            case.dtype == dtype && case.kv_len > 1 && (case.q_len > 1) == prefill
        })
    };
    ARMS.map(|(name, ..)| {
        let mut line = Line::new();
        for case in cases() {
            if let Some(arm) = case.arm(name) {
                line.entry(case.kv_len).or_insert(arm.median());
            }
        }
        line
    })
}

fn chart(path: &Path, title: &str, lines: &[Line]) -> Result<()> {
    let keys = || lines.iter().flat_map(|line| line.keys().copied());
    let times = || lines.iter().flat_map(|line| line.values().copied());
    let (first, last) = (keys().min().unwrap_or(1), keys().max().unwrap_or(2));
    let least = times().fold(f64::MAX, f64::min) / 1.5;
    let most = times().fold(0.0, f64::max) * 1.5;
    let root = SVGBackend::new(path, (720, 440)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (first as f64 * 0.8..last as f64 * 1.25).log_scale(),
            (least..most).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("keys")
        .y_desc("milliseconds (median)")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y}"))
        .light_line_style(RGBColor(240, 240, 240))
        .draw()?;
    for (line, (_, label, colour)) in lines.iter().zip(ARMS) {
        if line.is_empty() {
            continue;
        }
        let points = || line.iter().map(|(keys, ms)| (*keys as f64, *ms));
        chart
            .draw_series(LineSeries::new(points(), colour.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(points().map(|at| Circle::new(at, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.9))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    root.present()?;
    Ok(())
}
