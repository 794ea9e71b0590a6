//! Medians over context, a line an arm, one chart for each kind of test.

use crate::measure::Row;
use anyhow::{Context, Result};
use plotters::prelude::*;
use std::path::Path;

const COLOURS: [RGBColor; 6] = [
    RGBColor(120, 120, 120),
    RGBColor(200, 40, 40),
    RGBColor(40, 90, 200),
    RGBColor(40, 150, 80),
    RGBColor(140, 80, 170),
    RGBColor(200, 140, 20),
];

const WIDTH: u32 = 720;
const HEIGHT: u32 = 440;

fn distinct<T: PartialEq + Clone>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen: Vec<T> = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

pub fn draw(path: &Path, title: &str, rows: &[Row]) -> Result<()> {
    let tests = distinct(rows.iter().map(|row| row.test.clone()));
    let root = SVGBackend::new(path, (WIDTH, HEIGHT * tests.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, test) in root.split_evenly((tests.len(), 1)).iter().zip(&tests) {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.test == *test).collect();
        chart(area, &format!("{test}: {title}"), &rows)?;
    }
    root.present().with_context(|| path.display().to_string())
}

/// The lowest and highest value, with room on both sides; a lone value gets some, too.
fn range(values: impl Iterator<Item = f64> + Clone) -> std::ops::Range<f64> {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    low / 1.3..high * 1.3
}

fn chart<'a, D: DrawingBackend<ErrorType: 'static> + 'a>(
    area: &DrawingArea<D, plotters::coord::Shift>,
    title: &str,
    rows: &[&Row],
) -> Result<()> {
    // A logarithm wants something above 0.
    let x = |row: &Row| row.context.max(1) as f64;
    let (xs, ys) = (
        range(rows.iter().map(|row| x(row))),
        range(rows.iter().map(|row| row.median_ms())),
    );
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .margin_right(24)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(xs.log_scale(), ys.log_scale())?;
    chart
        .configure_mesh()
        .x_desc("tokens of context")
        .y_desc("milliseconds, median")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.3}"))
        .light_line_style(BLACK.mix(0.06))
        .draw()?;
    for (i, arm) in distinct(rows.iter().map(|row| row.arm.as_str()))
        .into_iter()
        .enumerate()
    {
        let colour = COLOURS[i % COLOURS.len()];
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.arm == arm)
            .map(|row| (x(row), row.median_ms()))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)).point_size(3))?
            .label(arm)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    Ok(())
}
