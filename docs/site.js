// Material gives every code block a bar with a copy button, and every table a box that scrolls, when they come into view. Landmarks need names
// of their own (so do lists of contents, of which a narrow screen has several), and a box that scrolls (of a table, or of a diagram on a narrow
// screen) needs the focus, so that a keyboard can move it.
const repair = () => {
  const taken = new Set()
  document.querySelectorAll("nav[aria-label]").forEach((list, i) => {
    if (taken.has(list.getAttribute("aria-label"))) list.setAttribute("aria-label", `${list.getAttribute("aria-label")} (${i})`)
    taken.add(list.getAttribute("aria-label"))
  })
  document.querySelectorAll(".md-code__nav").forEach((bar, i) => bar.setAttribute("aria-label", `Code ${i + 1}`))
  document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset p:has(> img[src$=".svg"])').forEach((box, i) => {
    const attributes = { tabindex: "0", role: "region", "aria-label": `${box.matches("p") ? "Diagram" : "Table"} ${i + 1}` }
    for (const [name, value] of Object.entries(attributes))
      box.scrollWidth > box.clientWidth ? box.setAttribute(name, value) : box.removeAttribute(name)
  })
}
new MutationObserver(repair).observe(document.body, { childList: true, subtree: true })
addEventListener("resize", repair)
addEventListener("load", repair)
