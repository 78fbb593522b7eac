/* Libraries that have variables of the driver's names, as function loaders without hidden visibility do. */
#ifndef GPUSLICE_VARIABLES_H
#define GPUSLICE_VARIABLES_H

/* The linker found our functions in their place: gives the variables back to those who mean them. What was loaded before the last
 * time costs nothing more. */
void gs_give_variables_back(void);

#endif
