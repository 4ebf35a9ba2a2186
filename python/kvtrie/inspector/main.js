// Shows what the page has.

const place = document.getElementById("main");
if (data.tree) {
  const tree = await showTree(place, data.tree, data.plan);
  if (data.plan) await showPlan(place, data.plan, tree);
} else if (data.plan) {
  await showPlan(place, data.plan, null);
  painted();
} else {
  await showTraffic(place, data.traffic);
}
document.documentElement.dataset.ready = "true";
