"""The page's style sheet: light and dark by preference, black on white on paper."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--rule:#d0d7de;--pane:#f6f8fa;
--good:#116329;--watch:#7d4e00;--bad:#a40e26;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#57606a;--c6:#9a6700;--c7:#0a7c86}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--soft:#9da7b3;--rule:#3d444d;
--pane:#161b22;--good:#3fb950;--watch:#d29922;--bad:#ff7b72;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;--c5:#9da7b3;--c6:#d29922;--c7:#39c5cf}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.2rem 0 .6rem;padding-bottom:.2rem;border-bottom:1px solid var(--rule)}
h3{font-size:1.05rem;margin:1.6rem 0 .2rem}
code,pre{font-family:ui-monospace,monospace;font-size:.92em}
pre{background:var(--pane);padding:.7rem;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}
.when,.none,figcaption,caption{color:var(--soft)}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{text-align:left;padding:.2rem 0}
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;
border-bottom:1px solid var(--rule);overflow-wrap:break-word;max-width:40rem}
td:last-child{overflow-wrap:anywhere;min-width:9ch}
thead th{border-bottom-width:2px}
tbody th{font-weight:500}
.grade{font-weight:600}
.good{color:var(--good)}.watch{color:var(--watch)}.bad{color:var(--bad)}.grade.none{color:var(--soft)}
figure{margin:1rem 0}
figcaption{font-size:.9rem}
svg{display:block;max-width:100%;height:auto;background:var(--pane)}
svg.wide{width:100%}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(24rem,100%),1fr));gap:0 1.5rem}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:.6}.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:1.3}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}.line.c7{stroke:var(--c7)}
.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}
.dot.c4{fill:var(--c4)}.dot.c5{fill:var(--c5)}.dot.c6{fill:var(--c6)}.dot.c7{fill:var(--c7)}
.cell{stroke:var(--bg);stroke-width:.5}
rect.cell:not([fill]){fill:var(--rule);fill-opacity:.5}
.key{display:inline-block;width:10rem;height:.7rem;vertical-align:middle}
.scale{font-size:.85rem;color:var(--soft);margin:.2rem 0}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:.3rem 0;
font-size:.85rem}
.swatch{display:inline-block;width:1.2rem;height:.2rem;margin-right:.4rem;vertical-align:middle}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}
.b4{background:var(--c4)}.b5{background:var(--c5)}.b6{background:var(--c6)}.b7{background:var(--c7)}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft)}
@media print{:root{--bg:#fff;--fg:#000;--soft:#333;--rule:#999;--pane:#fff;--good:#116329;
--watch:#7d4e00;--bad:#a40e26}main{max-width:none;padding:0}body{font-size:11pt}
figure,tr{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
