//! A run's loss over its steps: as a picture (SVG, PNG) and in the terminal.
//!
//! Where the training losses are many, the strong line is their exponential moving average and the
//! single values stand behind it in a lighter tone. A loss that is not finite is a gap in the line.

use std::sync::OnceLock;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::output::grouped;
use metal_candle::train::Metric;
use metal_candle::{Error, Result};

/// What a loss curve shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossCurve {
    /// The heading, such as the run's name.
    pub title: String,
    /// Step and loss of the training reports.
    pub train: Vec<(u64, f64)>,
    /// Step and loss of the evaluations.
    pub evaluation: Vec<(u64, f64)>,
    /// Of a run that compares answers: how often the better one had the higher reward in the training reports.
    pub accuracy: Vec<(u64, f64)>,
    /// The same in the evaluations.
    pub evaluation_accuracy: Vec<(u64, f64)>,
}

impl LossCurve {
    /// The curve of a run's events.
    pub fn from_metrics<'a>(
        title: impl Into<String>,
        metrics: impl IntoIterator<Item = &'a Metric>,
    ) -> Self {
        let mut curve = Self { title: title.into(), ..Self::default() };
        for metric in metrics {
            let (step, loss, metrics, points, accuracies) = match metric {
                Metric::Train { step, loss, metrics, .. } => {
                    (step, loss, metrics, &mut curve.train, &mut curve.accuracy)
                }
                Metric::Evaluation { step, loss, metrics, .. } => {
                    (step, loss, metrics, &mut curve.evaluation, &mut curve.evaluation_accuracy)
                }
                _ => continue,
            };
            points.push((*step, *loss));
            accuracies.extend(metrics.get("rewards/accuracies").map(|share| (*step, *share)));
        }
        curve
    }
}

/// What one part of a picture shows.
struct Panel<'a> {
    label: &'static str,
    train: &'a [(u64, f64)],
    evaluation: &'a [(u64, f64)],
    top: f64,
    bottom: f64,
}

const WIDTH: u32 = 1200;
const HEIGHT: u32 = 700;
// Plotters draws on whole pixels; a finer grid makes the lines of both pictures smooth.
const SCALE: u32 = 3;

// The name under which the font is known to Plotters is also what the SVG asks its viewer for.
const FONT: &str = "Ubuntu, Helvetica, Arial, sans-serif";

const TRAIN: RGBColor = RGBColor(37, 99, 235);
const TRAIN_LIGHT: RGBColor = RGBColor(190, 208, 250);
const EVALUATION: RGBColor = RGBColor(234, 88, 12);
const GRID: RGBColor = RGBColor(229, 231, 235);
const AXIS: RGBColor = RGBColor(156, 163, 175);
const TEXT: RGBColor = RGBColor(55, 65, 81);
const HEADING: RGBColor = RGBColor(17, 24, 39);

/// The loss curve as an SVG document of 1200 x 700. Its text asks for common fonts and falls back
/// to the viewer's sans-serif.
///
/// # Errors
/// [`Error::Io`] when drawing fails, which no curve makes it do.
pub fn loss_curve_svg(curve: &LossCurve) -> Result<String> {
    let size = (WIDTH * SCALE, HEIGHT * SCALE);
    let mut svg = String::new();
    draw(curve, SVGBackend::with_string(&mut svg, size).into_drawing_area(), 0.0)?;
    // The fine grid stays inside, as the view box; outside the picture has its own size.
    let fine = format!(r#"width="{}" height="{}""#, size.0, size.1);
    Ok(svg.replacen(&fine, &format!(r#"width="{WIDTH}" height="{HEIGHT}""#), 1))
}

/// The loss curve as a PNG file of 1200 x 700, 8-bit RGB.
///
/// # Errors
/// [`Error::Io`] when drawing or encoding fails, which no curve makes it do.
pub fn loss_curve_png(curve: &LossCurve) -> Result<Vec<u8>> {
    let (width, height) = (WIDTH * SCALE, HEIGHT * SCALE);
    let mut fine = vec![255; (width * height * 3) as usize];
    // On a bitmap, Plotters centres text by its em box and it stands a sixth of its size too high.
    let area = BitMapBackend::with_buffer(&mut fine, (width, height)).into_drawing_area();
    draw(curve, area, 1.0 / 6.0)?;

    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, WIDTH, HEIGHT);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(drawing)?;
    writer.write_image_data(&shrink(&fine)).map_err(drawing)?;
    writer.finish().map_err(drawing)?;
    Ok(file)
}

/// Each pixel the mean of `SCALE` x `SCALE` of the fine image.
fn shrink(fine: &[u8]) -> Vec<u8> {
    let row = (WIDTH * SCALE * 3) as usize;
    let scale = SCALE as usize;
    let mut image = Vec::with_capacity((WIDTH * HEIGHT * 3) as usize);
    for rows in fine.chunks_exact(row * scale) {
        for x in 0..WIDTH as usize {
            for channel in 0..3 {
                let pixels = rows.chunks_exact(row).flat_map(|row| {
                    row.iter().skip(x * scale * 3 + channel).step_by(3).take(scale)
                });
                let sum: u32 = pixels.map(|&value| u32::from(value)).sum();
                image.push((sum / (SCALE * SCALE)) as u8);
            }
        }
    }
    image
}

fn drawing(error: impl std::fmt::Display) -> Error {
    Error::io("loss curve")(std::io::Error::other(error.to_string()))
}

fn font_is_registered() -> Result<()> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let register =
        || register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).is_ok();
    if *REGISTERED.get_or_init(register) { Ok(()) } else { Err(drawing("the font is damaged")) }
}

/// Draws on an area of `WIDTH · SCALE` by `HEIGHT · SCALE`, with text lowered by `lower` of its
/// size.
fn draw<B: DrawingBackend>(
    curve: &LossCurve,
    area: DrawingArea<B, Shift>,
    lower: f64,
) -> Result<()> {
    font_is_registered()?;
    draw_all(curve, &area, lower).and_then(|()| area.present()).map_err(drawing)
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn draw_all<B: DrawingBackend>(
    curve: &LossCurve,
    area: &DrawingArea<B, Shift>,
    lower: f64,
) -> Drawn<B> {
    let scale = f64::from(SCALE);
    let at = |x: f64, y: f64| ((x * scale).round() as i32, (y * scale).round() as i32);
    let write = |text: &str, (x, y): (f64, f64), size: f64, color: RGBColor, anchor: Pos| {
        let style = (FONT, size * scale).into_font().color(&color).pos(anchor);
        area.draw(&Text::new(text.to_owned(), at(x, y + lower * size), style))
    };
    let stroke = |color: RGBColor, width: f64| color.stroke_width((width * scale).round() as u32);
    let line = |points: &[(f64, f64)], color: RGBColor, width: f64| {
        let points: Vec<_> = points.iter().map(|&(x, y)| at(x, y)).collect();
        area.draw(&PathElement::new(points, stroke(color, width)))
    };
    let dot = |(x, y): (f64, f64), radius: f64, color: RGBColor| {
        area.draw(&Circle::new(at(x, y), (radius * scale).round() as i32, color.filled()))
    };
    const LEFT: Pos = Pos { h_pos: HPos::Left, v_pos: VPos::Center };
    const RIGHT: Pos = Pos { h_pos: HPos::Right, v_pos: VPos::Center };
    const CENTER: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Center };

    area.fill(&WHITE)?;
    write(&shortened(&curve.title), (84.0, 44.0), 27.0, HEADING, LEFT)?;
    write(&summary(curve), (84.0, 77.0), 18.0, TEXT, LEFT)?;

    let (left, right, top, bottom) = (84.0, 1164.0, 112.0, 620.0);
    let (train, evaluation) = (curve.train.as_slice(), curve.evaluation.as_slice());
    let loss = Panel { label: "Loss", train, evaluation, top, bottom };
    let panels = if curve.accuracy.is_empty() && curve.evaluation_accuracy.is_empty() {
        vec![loss]
    } else {
        let (train, evaluation) = (&curve.accuracy, &curve.evaluation_accuracy);
        let accuracy = Panel { label: "Accuracy", train, evaluation, top: 404.0, bottom };
        vec![Panel { bottom: 360.0, ..loss }, accuracy]
    };
    // Beyond this many, dots would run into each other.
    let dots = if curve.evaluation.len() <= 60 { 4.5 } else { 0.0 };
    for Panel { label, train, evaluation, top, bottom } in &panels {
        let (top, bottom) = (*top, *bottom);
        let frame = Frame::of(train, evaluation);
        let place = |(step, loss): (f64, f64)| {
            let (x, y) = frame.place(step, loss);
            (left + x * (right - left), bottom - y * (bottom - top))
        };
        for (tick, label) in frame.loss_ticks(if panels.len() == 1 { 7 } else { 4 }) {
            let y = place((frame.first, tick)).1;
            line(&[(left, y), (right, y)], GRID, 1.0)?;
            write(&label, (left - 12.0, y), 17.0, TEXT, RIGHT)?;
        }
        line(&[(left, bottom), (right, bottom)], AXIS, 1.0)?;
        for (tick, label) in frame.step_ticks(9) {
            let x = place((tick, frame.low)).0;
            line(&[(x, bottom), (x, bottom + 6.0)], AXIS, 1.0)?;
            write(&label, (x, bottom + 22.0), 17.0, TEXT, CENTER)?;
        }
        let upright = (FONT, 18.0 * scale).into_font().transform(FontTransform::Rotate270);
        let upright = upright.color(&TEXT).pos(CENTER);
        area.draw(&Text::new(*label, at(24.0 + lower * 18.0, (top + bottom) / 2.0), upright))?;

        let series = |points: &[(u64, f64)], color: RGBColor, width: f64, dots: f64| -> Drawn<B> {
            for run in runs(points) {
                let points: Vec<_> = run.iter().copied().map(place).collect();
                line(&points, color, width)?;
                // A line of one point has no length and would not be seen.
                if dots > 0.0 || points.len() == 1 {
                    for &point in &points {
                        dot(point, dots.max(4.0), color)?;
                    }
                }
            }
            Ok(())
        };
        match smooth(train) {
            Some(smoothed) => {
                series(train, TRAIN_LIGHT, 1.5, 0.0)?;
                series(&smoothed, TRAIN, 2.5, 0.0)?;
            }
            None => series(train, TRAIN, 2.5, 0.0)?,
        }
        series(evaluation, EVALUATION, 2.5, dots)?;
    }
    write("Step", ((left + right) / 2.0, 670.0), 18.0, TEXT, CENTER)?;

    let smoothed = smooth(&curve.train);
    let mut legend = Vec::new();
    if !curve.train.is_empty() {
        let smooth = if smoothed.is_some() { "Training (smoothed)" } else { "Training" };
        legend.push((smooth, TRAIN, 0.0));
    }
    if !curve.evaluation.is_empty() {
        legend.push(("Evaluation", EVALUATION, dots));
    }
    let mut x = right;
    for (label, color, dots) in legend.into_iter().rev() {
        write(label, (x, 77.0), 18.0, TEXT, RIGHT)?;
        let font = (FONT, 18.0 * scale).into_font();
        // The size cannot fail to be known for a registered font.
        let (width, _) = font.box_size(label).unwrap_or_default();
        x -= f64::from(width) / scale + 10.0;
        line(&[(x - 30.0, 77.0), (x, 77.0)], color, 2.5)?;
        if dots > 0.0 {
            dot((x - 15.0, 77.0), dots, color)?;
        }
        x -= 30.0 + 28.0;
    }
    Ok(())
}

/// A heading that fits the picture's width on one line.
fn shortened(title: &str) -> String {
    const LONGEST: usize = 84;
    let line: String = title.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default().trim_end()),
        None => line,
    }
}

/// The last training loss and the lowest evaluation, in words.
fn summary(curve: &LossCurve) -> String {
    let last = curve.train.iter().rfind(|point| can_draw(point.1));
    let lowest = curve.evaluation.iter().filter(|point| can_draw(point.1));
    let lowest = lowest.min_by(|a, b| a.1.total_cmp(&b.1));
    let mut parts = Vec::new();
    if let Some((step, loss)) = last {
        parts.push(format!("training {loss:.3} at step {}", grouped(*step)));
    }
    if let Some((step, loss)) = lowest {
        parts.push(format!("lowest evaluation {loss:.3} at step {}", grouped(*step)));
    }
    if parts.is_empty() { "no losses yet".into() } else { parts.join("   ·   ") }
}

/// The loss curve in characters, `width` columns wide (from 48 to 400) and 15 lines high, each
/// ended by a line feed. Training is drawn in braille dots, evaluations as `●`.
pub fn terminal_curve(curve: &LossCurve, width: usize) -> String {
    const ROWS: usize = 12;
    let frame = Frame::of(&curve.train, &curve.evaluation);
    let ticks = frame.loss_ticks(5);
    let margin = ticks.iter().map(|(_, label)| label.len()).max().unwrap_or(0);
    let columns = width.clamp(48, 400).saturating_sub(margin + 2).max(1);

    let mut canvas = Canvas::new(columns, ROWS);
    let smoothed = smooth(&curve.train);
    for run in runs(smoothed.as_ref().unwrap_or(&curve.train)) {
        let points: Vec<_> = run.iter().map(|&(step, loss)| frame.place(step, loss)).collect();
        canvas.line(&points);
        // A single dot would hardly be seen.
        if let &[(x, y)] = points.as_slice() {
            canvas.mark(x, y, '•');
        }
    }
    for point in runs(&curve.evaluation).iter().flatten() {
        let (x, y) = frame.place(point.0, point.1);
        canvas.mark(x, y, '●');
    }

    let mut labels = vec![""; ROWS];
    for (tick, label) in &ticks {
        let (x, y) = canvas.dot_at(frame.place(frame.first, *tick));
        if let Some(row) = labels.get_mut(canvas.cell(x, y) / columns) {
            *row = label;
        }
    }
    let mut text = String::new();
    for (label, cells) in labels.into_iter().zip(canvas.rows()) {
        let tick = if label.is_empty() { '│' } else { '┤' };
        text.push_str(format!("{label:>margin$} {tick}{cells}").trim_end());
        text.push('\n');
    }
    text.push_str(&format!("{:margin$} └{}\n", "", "─".repeat(columns)));
    let (first, last) = (grouped(frame.first as u64), grouped(frame.last as u64));
    let ends = match columns.checked_sub(first.len() + last.len()) {
        Some(gap @ 1..) => format!("{first}{:gap$}{last}", ""),
        _ => format!("{last:>columns$}"),
    };
    text.push_str(&format!("{:margin$}  {ends}\n", ""));
    let mut legend = Vec::new();
    if !curve.train.is_empty() {
        legend.push(if smoothed.is_some() {
            "⠒⠒ training (smoothed)"
        } else {
            "⠒⠒ training"
        });
    }
    if !curve.evaluation.is_empty() {
        legend.push("● evaluation");
    }
    text.push_str(format!("{:margin$}  {}", "", legend.join("   ")).trim_end());
    text.push('\n');
    text
}

/// Dots of a quarter by a half of a character, in Unicode's braille patterns.
struct Canvas {
    columns: usize,
    rows: usize,
    dots: Vec<u8>,
    marks: Vec<Option<char>>,
}

impl Canvas {
    fn new(columns: usize, rows: usize) -> Self {
        let cells = columns * rows;
        Self { columns, rows, dots: vec![0; cells], marks: vec![None; cells] }
    }

    /// The dot of a place in the unit square, with y upwards.
    fn dot_at(&self, (x, y): (f64, f64)) -> (i64, i64) {
        let (width, height) = ((self.columns * 2) as f64, (self.rows * 4) as f64);
        ((x * (width - 1.0)).round() as i64, ((1.0 - y) * (height - 1.0)).round() as i64)
    }

    fn cell(&self, x: i64, y: i64) -> usize {
        (y / 4) as usize * self.columns + (x / 2) as usize
    }

    fn set(&mut self, x: i64, y: i64) {
        // Bit n of a pattern is dot n + 1: three down on each side, then the bottom row.
        const BITS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
        let cell = self.cell(x, y);
        if let Some(dots) = self.dots.get_mut(cell) {
            *dots |= BITS[(y % 4) as usize][(x % 2) as usize];
        }
    }

    fn mark(&mut self, x: f64, y: f64, mark: char) {
        let (x, y) = self.dot_at((x, y));
        let cell = self.cell(x, y);
        if let Some(slot) = self.marks.get_mut(cell) {
            *slot = Some(mark);
        }
    }

    fn line(&mut self, points: &[(f64, f64)]) {
        let mut before = None;
        for &point in points {
            let (x1, y1) = self.dot_at(point);
            let (x0, y0) = before.unwrap_or((x1, y1));
            let length = (x1 - x0).abs().max((y1 - y0).abs()).max(1);
            for step in 0..=length {
                let part = step as f64 / length as f64;
                let between =
                    |from: i64, to: i64| from + ((to - from) as f64 * part).round() as i64;
                self.set(between(x0, x1), between(y0, y1));
            }
            before = Some((x1, y1));
        }
    }

    fn rows(&self) -> impl Iterator<Item = String> {
        let cell = |(&dots, &mark): (&u8, &Option<char>)| match (mark, dots) {
            (Some(mark), _) => mark,
            (None, 0) => ' ',
            (None, dots) => char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' '),
        };
        let rows = self.dots.chunks(self.columns).zip(self.marks.chunks(self.columns));
        rows.map(move |(dots, marks)| dots.iter().zip(marks).map(cell).collect())
    }
}

/// The range of steps and losses that a picture shows; neither is empty.
struct Frame {
    first: f64,
    last: f64,
    low: f64,
    high: f64,
}

impl Frame {
    fn of(train: &[(u64, f64)], evaluation: &[(u64, f64)]) -> Self {
        let (mut first, mut last) = (u64::MAX, u64::MIN);
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        let all = train.iter().chain(evaluation).copied();
        for (step, loss) in all.filter(|&(_, loss)| can_draw(loss)) {
            (first, last) = (first.min(step), last.max(step));
            (low, high) = (low.min(loss), high.max(loss));
        }
        if first > last {
            return Self { first: 0.0, last: 1.0, low: 0.0, high: 1.0 };
        }
        if first == last {
            (first, last) = (first.saturating_sub(1), last.saturating_add(1));
        }
        // Losses that differ by less than an f64 of their size can tell are one line.
        let size = low.abs().max(high.abs());
        let margin =
            if high - low > 1e-6 * size { 0.06 * (high - low) } else { (0.1 * size).max(0.05) };
        // A cross entropy has nothing below 0.
        let floor = if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
        Self {
            first: first as f64,
            // Steps beyond 2^53 are equal as f64 although they differ.
            last: (last as f64).max(first as f64 * (1.0 + 1e-12)),
            low: (low - margin).max(floor),
            high: high + margin,
        }
    }

    /// A point's place in the unit square, with y upwards.
    fn place(&self, step: f64, loss: f64) -> (f64, f64) {
        let x = (step - self.first) / (self.last - self.first);
        let y = (loss - self.low) / (self.high - self.low);
        (x.clamp(0.0, 1.0), y.clamp(0.0, 1.0))
    }

    fn loss_ticks(&self, about: u32) -> Vec<(f64, String)> {
        let step = nice_step((self.high - self.low) / f64::from(about));
        let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        let label = |tick: f64| match tick.abs() {
            size if size >= 1e6 => format!("{tick:.2e}"),
            _ => format!("{tick:.digits$}"),
        };
        ticks(self.low, self.high, step).map(|tick| (tick, label(tick))).collect()
    }

    fn step_ticks(&self, about: u32) -> Vec<(f64, String)> {
        let step = nice_step((self.last - self.first) / f64::from(about)).max(1.0);
        ticks(self.first, self.last, step).map(|tick| (tick, grouped(tick as u64))).collect()
    }
}

/// The multiples of `step` from `low` to `high`.
fn ticks(low: f64, high: f64, step: f64) -> impl Iterator<Item = f64> {
    let first = (low / step).ceil();
    // Some two dozen at most whatever the numbers are: each is a line and a text.
    (0..24).map(move |n| (first + f64::from(n)) * step).take_while(move |&tick| tick <= high)
}

/// The smallest of 1, 2 or 5 times a power of ten that is not below `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|n| n * power).find(|&n| n >= least).unwrap_or(10.0 * power)
}

/// Whether a loss has a place in a picture. Beyond 10^12 it is a divergence, not a curve.
fn can_draw(loss: f64) -> bool {
    loss.abs() <= 1e12
}

/// The stretches between the gaps.
fn runs(points: &[(u64, f64)]) -> Vec<Vec<(f64, f64)>> {
    let stretches = points.split(|point| !can_draw(point.1)).filter(|run| !run.is_empty());
    stretches.map(|run| run.iter().map(|&(step, loss)| (step as f64, loss)).collect()).collect()
}

/// The exponential moving average over about a thirtieth of the points, with the bias towards its
/// start removed as Adam does; `None` for so few points that each can be seen.
fn smooth(points: &[(u64, f64)]) -> Option<Vec<(u64, f64)>> {
    const ENOUGH: usize = 60;
    if points.len() < ENOUGH {
        return None;
    }
    let keep = 1.0 - 2.0 / (points.len() as f64 / 30.0 + 1.0);
    let (mut mean, mut weight) = (0.0, 0.0);
    let smoothed = points.iter().map(|&(step, loss)| {
        if !can_draw(loss) {
            return (step, f64::NAN);
        }
        mean = keep * mean + (1.0 - keep) * loss;
        weight = keep * weight + (1.0 - keep);
        (step, mean / weight)
    });
    Some(smoothed.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decay(count: u64) -> LossCurve {
        let noise = |step: u64| (step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / 2e7;
        let loss = |step: u64| 0.4 + 2.4 * (-4.0 * step as f64 / count as f64).exp();
        LossCurve {
            title: "a <title> & \"more\"".into(),
            train: (1..=count).map(|step| (step * 10, loss(step) + 0.3 * noise(step))).collect(),
            evaluation: (0..=10).map(|n| (n * count, loss(n * count / 10) + 0.15)).collect(),
            ..LossCurve::default()
        }
    }

    /// With accuracies that rise from a half to 1.
    fn compared(count: u64) -> LossCurve {
        let accuracy = |step: u64| 1.0 - 0.5 * (-5.0 * step as f64 / count as f64).exp();
        LossCurve {
            accuracy: (1..=count).map(|step| (step * 10, accuracy(step))).collect(),
            evaluation_accuracy: (0..=10).map(|n| (n * count, accuracy(n * count / 10))).collect(),
            ..decay(count)
        }
    }

    fn shapes() -> Vec<(&'static str, LossCurve)> {
        let train =
            |points: &[(u64, f64)]| LossCurve { train: points.to_vec(), ..LossCurve::default() };
        vec![
            ("empty", LossCurve::default()),
            ("one point", train(&[(5, 1.25)])),
            ("one point at 0", train(&[(0, 0.0)])),
            ("last step", train(&[(u64::MAX, 1.0), (u64::MAX - 1, 2.0)])),
            ("constant", train(&[(1, 2.0), (2, 2.0), (3, 2.0)])),
            ("almost constant", train(&[(1, 1.0), (2, 1.0 + f64::EPSILON)])),
            ("only gaps", train(&[(1, f64::NAN), (2, f64::INFINITY)])),
            ("gaps", train(&[(1, 1.0), (2, f64::NAN), (3, 3.0), (4, 2.0), (5, f64::NAN)])),
            ("enormous", train(&[(1, 1e300), (2, -1e12), (3, 1e12)])),
            ("tiny", train(&[(1, 1e-300), (2, 3e-300)])),
            ("many", decay(200)),
            ("evaluation only", LossCurve { train: vec![], ..decay(20) }),
            ("accuracies", compared(30)),
            ("one accuracy", LossCurve { evaluation_accuracy: vec![(3, 0.5)], ..train(&[]) }),
        ]
    }

    #[test]
    fn every_shape_can_be_drawn() {
        for (name, curve) in shapes() {
            let svg = loss_curve_svg(&curve).expect(name);
            assert!(svg.starts_with("<svg width=\"1200\" height=\"700\" viewBox"), "{name}");
            assert!(svg.trim_end().ends_with("</svg>"), "{name}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}");
            for width in [0, 48, 60, 100, usize::MAX] {
                let text = terminal_curve(&curve, width);
                assert_eq!(text.lines().count(), 15, "{name}");
                let widest = text.lines().map(|line| line.chars().count()).max();
                assert!(widest <= Some(width.clamp(48, 400)), "{name} {width}: {widest:?}\n{text}");
            }
        }
    }

    #[test]
    fn the_png_is_a_picture_with_both_series_in_it() {
        let file = loss_curve_png(&decay(200)).expect("drawn");
        let mut reader =
            png::Decoder::new(std::io::Cursor::new(file)).read_info().expect("a PNG file");
        let mut pixels = vec![0; (WIDTH * HEIGHT * 3) as usize];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((info.width, info.height), (WIDTH, HEIGHT));
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        let count = |color: RGBColor| {
            pixels.chunks_exact(3).filter(|pixel| **pixel == [color.0, color.1, color.2]).count()
        };
        for color in [TRAIN, TRAIN_LIGHT, EVALUATION, GRID] {
            assert!(count(color) > 300, "{color:?}: {}", count(color));
        }
        assert!(count(WHITE) > pixels.len() / 3 * 8 / 10);
        // Text: the heading's strokes are thin, so few of its pixels are of its whole colour.
        let dark = pixels.chunks_exact(3).filter(|pixel| pixel.iter().all(|&v| v < 110)).count();
        assert!(dark > 300, "{dark}");
    }

    #[test]
    fn accuracies_have_a_part_of_the_picture() {
        let labels = |curve: &LossCurve| {
            let svg = loss_curve_svg(curve).expect("drawn");
            ["Loss", "Accuracy"].map(|label| svg.matches(&format!("\n{label}\n")).count())
        };
        assert_eq!((labels(&decay(20)), labels(&compared(20))), ([1, 0], [1, 1]));
    }

    #[test]
    fn the_svg_escapes_text_and_asks_for_fonts_that_exist() {
        let svg = loss_curve_svg(&decay(20)).expect("drawn");
        assert!(svg.contains("a &lt;title&gt; &amp; &quot;more&quot;"), "{svg}");
        let families = svg.matches("font-family").count();
        assert!(families > 10);
        let expected = r#"font-family="Ubuntu, Helvetica, Arial, sans-serif""#;
        assert_eq!(svg.matches(expected).count(), families);
    }

    #[test]
    fn a_long_heading_is_shortened_and_stays_on_one_line() {
        assert_eq!(shortened("a\nb"), "a b");
        assert_eq!(shortened(&"é".repeat(84)), "é".repeat(84));
        assert_eq!(shortened(&"é".repeat(85)), "é".repeat(84) + "…");
    }

    #[test]
    fn a_gap_divides_the_line_and_a_lone_point_is_a_dot() {
        let points = [(1, 1.0), (2, 2.0), (3, f64::NAN), (4, 1.0), (5, 1e13), (6, 1.5), (7, 2.0)];
        let stretches = runs(&points);
        assert_eq!(stretches.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 2]);
        let curve = LossCurve { train: points.to_vec(), ..Default::default() };
        let svg = loss_curve_svg(&curve).expect("drawn");
        let color = "#2563EB";
        let lines = svg.matches("<polyline").count();
        let whole = LossCurve { train: vec![(1, 1.0), (7, 2.0)], ..Default::default() };
        let svg_whole = loss_curve_svg(&whole).expect("drawn");
        assert!(svg.contains(color));
        assert_eq!(svg.matches("<circle").count(), 1);
        assert_eq!(svg_whole.matches("<circle").count(), 0);
        assert!(lines > svg_whole.matches("<polyline").count());
    }

    #[test]
    fn a_flat_line_is_at_its_label_in_the_middle_of_the_terminal() {
        let curve =
            LossCurve { train: (0..30).map(|step| (step, 2.0)).collect(), ..Default::default() };
        let text = terminal_curve(&curve, 60);
        let rows: Vec<_> = (0..12)
            .zip(text.lines())
            .filter(|(_, line)| {
                line.contains("⠒⠒")
                    || line.contains("⣀⣀")
                    || line.contains("⠉⠉")
                    || line.contains("⠤⠤")
            })
            .collect();
        assert!(matches!(rows[..], [(5 | 6, row)] if row.starts_with("2.0 ┤")), "{text}");
    }
    #[test]
    fn a_falling_loss_goes_from_the_upper_left_to_the_lower_right() {
        let curve = LossCurve {
            train: (0..=50).map(|step| (step, 5.0 - 0.08 * step as f64)).collect(),
            evaluation: vec![(0, 5.0), (50, 1.0)],
            ..Default::default()
        };
        let text = terminal_curve(&curve, 60);
        let columns: Vec<_> = text
            .lines()
            .take(12)
            .filter_map(|line| line.chars().skip(7).position(|c| c != ' '))
            .collect();
        assert!(columns.len() > 9 && columns.is_sorted(), "{columns:?}\n{text}");
        assert_eq!(text.lines().take(12).filter(|line| line.contains('●')).count(), 2, "{text}");
    }

    #[test]
    fn the_moving_average_keeps_a_constant_and_its_gaps() {
        let mut points: Vec<_> = (0..100).map(|step| (step, 3.0)).collect();
        points[40].1 = f64::NAN;
        let smoothed = smooth(&points).expect("enough");
        assert!(smoothed[40].1.is_nan());
        assert!(smoothed.iter().all(|&(step, loss)| step == 40 || (loss - 3.0).abs() < 1e-12));
        assert_eq!(smooth(&points[..59]), None);
    }

    #[test]
    fn ticks_are_round_numbers_inside_the_range() {
        for (low, high, about) in [(0.0, 1.0, 5), (0.3, 3.7, 7), (1e-6, 3e-6, 7), (10.0, 12.0, 9)] {
            let frame = Frame { first: 0.0, last: 1.0, low, high };
            let ticks = frame.loss_ticks(about);
            assert!((3..=2 * about as usize).contains(&ticks.len()), "{ticks:?}");
            for (tick, label) in &ticks {
                assert!(*tick >= low && *tick <= high, "{ticks:?}");
                let read: f64 = label.parse().expect("a number");
                assert!((read - tick).abs() <= 1e-9 * (1.0 + tick.abs()), "{ticks:?}");
            }
        }
    }

    #[test]
    fn a_curve_takes_the_losses_of_the_events() {
        let metrics = [
            Metric::Evaluation {
                step: 0,
                loss: 3.0,
                perplexity: Some(20.0),
                metrics: Default::default(),
                tokens: 1,
                seconds: 0.0,
            },
            Metric::Skipped { step: 1, reason: "a NaN".into() },
        ];
        let curve = LossCurve::from_metrics("run", &metrics);
        assert_eq!(curve.evaluation, [(0, 3.0)]);
        assert_eq!(curve.train, []);
    }
}
